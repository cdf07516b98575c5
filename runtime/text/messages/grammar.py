"""Grammars of messages with calls or reasoning, in llguidance's Lark."""

import re
from collections.abc import Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.calls import CallFormat, Schemas
from enginewright.runtime.text.messages.harmony import FINAL, HARMONY, NEXT, PREAMBLES
from enginewright.runtime.text.messages.lark import ANY, Lark
from enginewright.runtime.text.messages.parser import MessageFormat, ReasoningPlace

MAX_CALLS = 16  # maximum number of calls in a message with a grammar
MAX_PREAMBLES = 8  # maximum number of messages before the last one of an answer
SpecialTokens = Mapping[str, int]  # ids of the marks that are special tokens


def only_calls(calls: CallFormat, schemas: Schemas, special_tokens: SpecialTokens, *, several: bool) -> str:
    """The grammar of calls without any other text.

    Args:
        calls: the model's format of calls.
        schemas: schemas of the tools that may be called, at least one.
        special_tokens: ids of marks that are special tokens.
        several: whether there may be more than one call.

    Raises:
        UsageError: a call cannot be written in the model's format.
    """
    lark = Lark(special_tokens)
    return lark.source(_block(lark, calls, schemas, several=several))


def text_and_calls(calls: CallFormat, schemas: Schemas, special_tokens: SpecialTokens, *, several: bool) -> str:
    """The grammar of any text in which everything that starts like a call is a valid call.

    Args:
        calls: as of `only_calls`.
        schemas: as of `only_calls`.
        special_tokens: as of `only_calls`.
        several: as of `only_calls`.

    Raises:
        UsageError: a call cannot be written in the model's format.
    """
    lark = Lark(special_tokens)
    if calls is HARMONY:
        text = f"{lark.text(FINAL)} {lark.terminal(ANY)}"
        return lark.source(f"{text} | {_block(lark, calls, schemas, several=several)}")
    if not calls.open:
        begin = re.escape(calls.begins)
        text = lark.terminal(rf"/\s*([^\s{begin}](?s:.*))?/")
        return lark.source(f"{text} | {_block(lark, calls, schemas, several=several)}")
    block = _block(lark, calls, schemas, several=several and bool(calls.written.first), begun=calls.open)
    called = f"{lark.free(calls.open)} {block}"
    return lark.source(f"({called}){{0,{MAX_CALLS if several else 1}}} {lark.rest((calls.open,))}")


def answer_or_calls(
    form: MessageFormat,
    schemas: Schemas,
    special_tokens: SpecialTokens,
    place: ReasoningPlace,
    json_options: Mapping[str, Any] | None,
    *,
    several: bool,
) -> str:
    """The grammar of a message that ends with an answer, which @answer stands for, or with calls and nothing else.

    Args:
        form: the message format of a model that calls tools.
        schemas: as of `only_calls`.
        special_tokens: as of `only_calls`.
        place: where in the reasoning the prompt ends.
        json_options: llguidance's options of the answer, if it is JSON.
        several: as of `only_calls`.

    Raises:
        UsageError: a call cannot be written in the model's format.
    """
    assert form.calls is not None
    lark = Lark(special_tokens)
    before = _before(lark, form, place, is_text=False)
    answer = f"{lark.text(FINAL) if form.calls is HARMONY else ''} @answer"
    calls = _block(lark, form.calls, schemas, several=several, json_options=json_options)
    return lark.source(f"{before} ({answer} | {calls})")


def _block(
    lark: Lark,
    calls: CallFormat,
    schemas: Schemas,
    *,
    several: bool,
    begun: str = "",
    json_options: Mapping[str, Any] | None = None,
) -> str:
    """The rule of one call, or of consecutive calls.

    Args:
        begun: the part of it that precedes the rule.
        json_options: options of JSON that may come instead of the calls. A call that is JSON, too, gets the same ones,
            since llguidance cannot distinguish two texts with the same start that consist of different lexemes.
    """
    written = calls.written
    first, before_name = written.first, written.before_name
    if begun and first:
        first = first.removeprefix(begun)
    elif begun:
        before_name = before_name.removeprefix(begun)
    rules = []
    for name, schema in schemas.items():
        lark.tool = name if name.isprintable() else ""
        if not re.fullmatch(written.name, name):
            raise UsageError(f"the tool {name!r} cannot be called", "its name cannot be written in the model's format")
        if written.json_keys is not None and json_options is not None:
            rules.append(lark.rule(lark.json(_as_json(name, schema, written.json_keys), **json_options)))
            continue
        arguments = written.arguments.rule(lark, schema)
        before = lark.text(before_name + name + written.before_arguments)
        rules.append(lark.rule(f"{before} {arguments} {lark.text(written.after_arguments)}"))
    lark.tool = ""
    call = lark.rule(" | ".join(rules))
    more = ""
    if several and written.between is not None:
        more = f"({lark.text(written.between)} {call}){{0,{MAX_CALLS - 1}}}"
    return f"{lark.text(first)} {call} {more} {lark.text(written.last)}"


def _as_json(name: str, schema: Mapping[str, Any], keys: tuple[str, str]) -> dict[str, Any]:
    """Schema of a call as an object. It has an id, since references in the arguments' schema are relative to that."""
    arguments = {"$id": f"tool:{name}", "type": "object", "properties": {}, **schema}
    properties = dict(zip(keys, ({"const": name}, arguments), strict=True))
    return {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}


def before_answer(
    form: MessageFormat, special_tokens: SpecialTokens, place: ReasoningPlace, *, is_text: bool = True
) -> str | None:
    """The grammar of the part of a message before an answer: its reasoning, if there is any; None if there is nothing.

    Args:
        form: the model's message format.
        special_tokens: ids of marks that are special tokens.
        place: where in the reasoning the prompt ends.
        is_text: whether the answer is a text; otherwise it is calls.
    """
    lark = Lark(special_tokens)
    before = _before(lark, form, place, is_text=is_text)
    if form.calls is HARMONY and is_text:
        before = f"{before} {lark.text(FINAL)}"
    return lark.source(before) if before else None


def _before(lark: Lark, form: MessageFormat, place: ReasoningPlace, *, is_text: bool) -> str:
    """The rule of that part, which may be empty. If calls are required, none starts in the reasoning."""
    if form.calls is HARMONY:
        begun = " | ".join(lark.text(one) for one in PREAMBLES)
        return f"(({begun}) {lark.free(NEXT)}){{0,{MAX_PREAMBLES}}}"
    if form.reasoning is None or place is ReasoningPlace.OVER:
        return ""
    opening = "" if is_text or form.calls is None else form.calls.open
    space = lark.terminal(r"/\s{0,4}/")
    thought = f"{lark.free(form.reasoning.close, without=(opening,) if opening else ())} {space}"
    return thought if place is ReasoningPlace.BEGUN else f"({lark.text(form.reasoning.open)} {thought})?"
