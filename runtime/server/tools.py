"""Tools in bodies of requests: what may be called, what has to be, and what was."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.protocol import convert, held_schema
from enginewright.runtime.text.messages.calls import Schemas
from enginewright.runtime.text.messages.grammar import answer_or_calls, before_answer, only_calls, text_and_calls
from enginewright.runtime.text.messages.history import parse_object
from enginewright.runtime.text.messages.parser import MessageFormat, ReasoningPlace
from enginewright.runtime.text.messages.plain import PLAIN
from enginewright.runtime.text.tokenizer import Tokenizer

MAX_TOOLS = 128
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: there are none, as in OpenAI's API
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(msgspec.Struct):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None  # JSON, or what a model has written in place of it


class ToolCall(msgspec.Struct):
    """A call that an assistant's message has made, as clients send it back."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Arguments are an object where they are JSON of one, else the text that they are (messages/history.py)."""
        given = self.function.arguments or {}
        found = parse_object(given) if isinstance(given, str) else given
        function = {"name": self.function.name, "arguments": given if found is None else found}
        return {"id": self.id or "", "type": "function", "function": function}


class Tools:
    """The tools of a request.

    Args:
        tools, choice: as the body has them.

    Raises:
        ApiError: they cannot be.
    """

    def __init__(self, tools: Sequence[Any] | None, choice: Any) -> None:
        given = list(tools or ())
        if len(given) > MAX_TOOLS:
            raise ApiError(400, f"tools must not hold more than {MAX_TOOLS} entries", param="tools")
        self.schemas: dict[str, Mapping[str, Any]] = {}
        self._places: dict[str, str] = {}  # the paths of their schemas in the body
        self._strict: set[str] = set()  # those whose arguments follow their schema whenever they are called
        for place, value in enumerate(given):
            where = f"tools[{place}].function"
            function = convert(value, Tool, f"tools[{place}]").function
            if not _NAME.fullmatch(function.name):
                rule = "must have 1 to 64 letters, digits, _, . or -"
                raise ApiError(400, f"{where}.name {rule}", param=f"{where}.name", code="invalid_value")
            if function.name in self.schemas:
                raise ApiError(400, f"{where}.name: there are two tools of this name", param=f"{where}.name")
            self.schemas[function.name] = NO_PARAMETERS if function.parameters is None else function.parameters
            self._places[function.name] = f"{where}.parameters"
            if function.strict:
                self._strict.add(function.name)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = convert(choice, AllowedChoice, "tool_choice").allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            if not names or not names <= self.schemas.keys():
                why = f"tool_choice.allowed_tools.tools must be of tools: {', '.join(self.schemas) or 'none'}"
                raise ApiError(400, why, param="tool_choice.allowed_tools.tools", code="invalid_value")
            given = [tool for tool in given if tool["function"]["name"] in names]
            self.schemas = {name: schema for name, schema in self.schemas.items() if name in names}
            self._strict &= names
            choice = allowed.mode
        self.forced = self._forced(choice)
        self._is_named = isinstance(choice, dict)  # the tool that has to be called
        # What the template shows: nothing that may not be called.
        self.shown: Sequence[Mapping[str, Any]] = () if choice == "none" else given
        self.may_be_called: Schemas | None = self.schemas if self.shown else None

    def _forced(self, choice: Any) -> Schemas:
        """The tools of which one has to be called; empty: none has."""
        match choice:
            case None | "none" | "auto":
                return {}
            case "required" if self.schemas:
                return self.schemas
            case {"type": "function", "function": {"name": str(name)}} if name in self.schemas:
                return {name: self.schemas[name]}
        names = ", ".join(self.schemas) or "none"
        why = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}} of one of tools'
        raise ApiError(400, f"tool_choice {why}: {names}", param="tool_choice", code="invalid_value")

    @property
    def unheld(self) -> list[ApiError]:
        """Keywords of schemas that no call is held to. Raises ApiError where a tool cannot be held to its schema."""
        return self._held[1]

    @cached_property
    def _held(self) -> tuple[Schemas, list[ApiError]]:
        """The schemas that calls are held to, and what is left out of them. Raises ApiError.

        Only tools that are strict are held to their schemas where the model chooses whether to call.
        """
        schemas, errors = dict[str, Mapping[str, Any]](), list[ApiError]()
        for name, schema in (self.forced or self.may_be_called or {}).items():
            schemas[name], is_strict = {}, name in self._strict
            if self.forced or is_strict:
                schemas[name], left_out = held_schema(schema, self._places[name], is_strict=is_strict)
                errors += left_out
        return schemas, errors

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ApiError where the model knows no tools, and none has to be called."""
        why = ""
        if self.shown and not tokenizer.template_names("tools") and not self.forced:
            why = "the model's chat template shows no tools; it can call one where tool_choice says that it has to"
        elif self.shown and self.form(tokenizer).calls is None:
            why = "no parser for this model's calls is known: --tool-call-parser of engine run names one"
        if why:
            raise ApiError(400, f"tools: {why}", param="tools", code="unsupported_parameter")

    def form(self, tokenizer: Tokenizer) -> MessageFormat:
        """The form of the model's messages. Where its template shows no tools, a call that has to come is plain."""
        form = tokenizer.message_format
        return replace(form, calls=PLAIN) if self.forced and not tokenizer.template_names("tools") else form

    def structure(
        self, tokenizer: Tokenizer, place: ReasoningPlace, answer: StructuredOutputsParams | None, *, several: bool
    ) -> StructuredOutputsParams | None:
        """The structure of a message: calls where one has to come; the answer, or calls in its place; or a text whose
        calls follow their schemas. None: it is free.

        Args:
            place: where in the reasoning the prompt ends.
            answer: structure of the answer, if it has one. One that is whole leaves no room for calls.
            several: there may be more calls than one.

        Raises:
            ApiError: a tool cannot be held to its schema.
        """
        form, ids = self.form(tokenizer), tokenizer.mark_ids
        assert form.calls is not None
        schemas = self._held[0]
        before = before_answer(form, ids, place, is_text=False)
        try:
            if self.forced:
                grammar = only_calls(form.calls, schemas, ids, several=several and not self._is_named)
                return StructuredOutputsParams(grammar=grammar, before=before)
            if answer is not None and answer.is_whole:
                return answer
            if answer is not None:
                options = answer.json_options if answer.is_json else None
                return replace(answer, within=answer_or_calls(form, schemas, ids, place, options, several=several))
            if not self._strict:
                return None
            grammar = text_and_calls(form.calls, schemas, ids, several=several)
            return StructuredOutputsParams(grammar=grammar, before=None if form.calls.open else before)
        except UsageError as error:
            key = "tool_choice" if self.forced else "tools"
            raise ApiError(400, f"{key}: {error}", param=key, code="invalid_value") from None
