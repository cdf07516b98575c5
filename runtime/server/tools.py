"""Tools in bodies of requests: the callable ones, the required ones, and earlier calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.protocol import convert, enforceable_schema
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
    """Function that the model may call."""

    name: str  # name of the function
    description: str | None = None  # description for the model
    # JSON schema of the arguments; None means no arguments, as in OpenAI's API
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true if arguments always follow the schema


class Tool(msgspec.Struct):
    """Tool that the model may call."""

    type: Literal["function"]  # kind of the tool
    function: Function  # function of the tool


class NamedFunction(msgspec.Struct):
    """Name of a function."""

    name: str  # name of the function


class NamedTool(msgspec.Struct):
    """Tool that must be called."""

    type: Literal["function"]  # kind of the tool
    function: NamedFunction  # function of the tool


class AllowedTools(msgspec.Struct):
    """Tools that may be called."""

    mode: Literal["auto", "required"]  # "required" if one of them must be called
    tools: list[NamedTool]  # tools that may be called


class AllowedChoice(msgspec.Struct):
    """Constraint to some of the tools."""

    type: Literal["allowed_tools"]  # kind of the constraint
    allowed_tools: AllowedTools  # tools that may be called


class CalledFunction(msgspec.Struct):
    """Function of an earlier call."""

    name: str  # name of the function
    arguments: str | dict[str, Any] | None = None  # arguments as JSON, or the text that a model wrote instead


class ToolCall(msgspec.Struct):
    """Call of an earlier answer, as clients send it back."""

    function: CalledFunction  # function that was called
    id: str | None = None  # id of the call
    type: Literal["function"] = "function"  # kind of the tool
    index: int | None = None  # number of the call in its message, not used

    def for_template(self) -> dict[str, Any]:
        """The call for the chat template; arguments that are no JSON object stay text (messages/history.py)."""
        given = self.function.arguments or {}
        found = parse_object(given) if isinstance(given, str) else given
        function = {"name": self.function.name, "arguments": given if found is None else found}
        return {"id": self.id or "", "type": "function", "function": function}


class Tools:
    """The tools of a request.

    Attributes:
        schemas: JSON schemas of the arguments, by the names of the tools that may be called.
        forced: schemas of the tools of which one must be called; empty if none must.
        shown: the tools that the chat template shows.
        may_be_called: schemas of the tools that may be called; None without tools.

    Args:
        tools: the key `tools` of the body.
        choice: the key `tool_choice` of the body.

    Raises:
        ApiError: they are not valid.
    """

    def __init__(self, tools: Sequence[Any] | None, choice: Any) -> None:
        given = list(tools or ())
        if len(given) > MAX_TOOLS:
            raise ApiError(400, f"tools must not hold more than {MAX_TOOLS} entries", param="tools")
        self.schemas: dict[str, Mapping[str, Any]] = {}
        self._schema_paths: dict[str, str] = {}  # paths of their schemas in the body
        self._strict: set[str] = set()  # names of tools whose arguments always follow their schema
        for place, value in enumerate(given):
            where = f"tools[{place}].function"
            function = convert(value, Tool, f"tools[{place}]").function
            if not _NAME.fullmatch(function.name):
                rule = "must have 1 to 64 letters, digits, _, . or -"
                raise ApiError(400, f"{where}.name {rule}", param=f"{where}.name", code="invalid_value")
            if function.name in self.schemas:
                raise ApiError(400, f"{where}.name: there are two tools of this name", param=f"{where}.name")
            self.schemas[function.name] = NO_PARAMETERS if function.parameters is None else function.parameters
            self._schema_paths[function.name] = f"{where}.parameters"
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
        self._is_named = isinstance(choice, dict)  # True if a certain tool must be called
        # The template shows no tool that may not be called.
        self.shown: Sequence[Mapping[str, Any]] = () if choice == "none" else given
        self.may_be_called: Schemas | None = self.schemas if self.shown else None

    def _forced(self, choice: Any) -> Schemas:
        """Schemas of the tools of which one must be called; empty if none must."""
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
    def unenforced(self) -> list[ApiError]:
        """Errors for schema keywords that are not enforced. Raises ApiError if a strict schema cannot be enforced."""
        return self._enforced[1]

    @cached_property
    def _enforced(self) -> tuple[Schemas, list[ApiError]]:
        """The schemas that calls follow, and errors for keywords that are left out of them. Raises ApiError.

        If the model chooses whether to call, only strict tools have their schemas enforced.
        """
        schemas, errors = dict[str, Mapping[str, Any]](), list[ApiError]()
        for name, schema in (self.forced or self.may_be_called or {}).items():
            schemas[name], is_strict = {}, name in self._strict
            if self.forced or is_strict:
                schemas[name], left_out = enforceable_schema(schema, self._schema_paths[name], is_strict=is_strict)
                errors += left_out
        return schemas, errors

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ApiError if the chat template or the parsers do not support tools, and no call is required."""
        why = ""
        if self.shown and not tokenizer.template_reads("tools") and not self.forced:
            why = "the model's chat template shows no tools; it can call one only if tool_choice requires it"
        elif self.shown and self.form(tokenizer).calls is None:
            why = "there is no parser for this model's calls: choose one with --tool-call-parser of engine run"
        if why:
            raise ApiError(400, f"tools: {why}", param="tools", code="unsupported_parameter")

    def form(self, tokenizer: Tokenizer) -> MessageFormat:
        """Format of the model's messages; required calls are plain if the chat template shows no tools."""
        form = tokenizer.message_format
        return replace(form, calls=PLAIN) if self.forced and not tokenizer.template_reads("tools") else form

    def structure(
        self, tokenizer: Tokenizer, place: ReasoningPlace, answer: StructuredOutputsParams | None, *, several: bool
    ) -> StructuredOutputsParams | None:
        """Structure of a message with tools.

        It is that of calls if one is required, else the answer's, or calls in its place, or a text whose calls follow
        their schemas.

        Args:
            tokenizer: the engine's tokenizer.
            place: where in the reasoning the prompt ends.
            answer: the structure of the answer, if it has one. A structure of the whole message excludes calls.
            several: whether there may be more than one call.

        Returns:
            The structure; None means free text.

        Raises:
            ApiError: the schema of a tool cannot be enforced.
        """
        form, ids = self.form(tokenizer), tokenizer.mark_ids
        assert form.calls is not None
        schemas = self._enforced[0]
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
