"""Grammars of messages with calls or reasoning, in llguidance's Lark."""

import re
from collections.abc import Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.calls import CallFormat, Schemas
from enginewright.runtime.text.messages.harmony import FINAL, HARMONY, NEXT, PREAMBLES
from enginewright.runtime.text.messages.lark import ANY, Lark
from enginewright.runtime.text.messages.parser import MessageFormat, ReasoningPlace

MAX_CALLS = 16  # of a message whose calls a grammar holds
MAX_PREAMBLES = 8  # of messages before the last one of an answer
SpecialTokens = Mapping[str, int]  # ids of the marks that are special tokens


def only_calls(calls: CallFormat, schemas: Schemas, special_tokens: SpecialTokens, *, several: bool) -> str:
    """Calls and nothing else.

    Args:
        schemas: of the tools that may be called, one at least.
        several: there may be more calls than one.

    Raises:
        UsageError: a call cannot be written in the model's form.
    """
    lark = Lark(special_tokens)
    return lark.source(_block(lark, calls, schemas, several=several))


def text_and_calls(calls: CallFormat, schemas: Schemas, special_tokens: SpecialTokens, *, several: bool) -> str:
    """Any text, in which what begins as a call is one; arguments as of `only_calls`.

    Raises:
        UsageError: a call cannot be written in the model's form.
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
    """A message that ends with an answer, which @answer stands for, or with calls and nothing else.

    Args:
        form: of a model that calls tools.
        schemas, several: as of `only_calls`.
        place: where in the reasoning the prompt ends.
        json_options: llguidance's of the answer, if it is JSON.

    Raises:
        UsageError: a call cannot be written in the model's form.
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
    """The rule of one call, or of several behind one another.

    Args:
        begun: what has come of it.
        json_options: of JSON that may come in place of the calls. Where a call is JSON, too, it has the same, since
            llguidance cannot tell two texts apart that begin alike and consist of different lexemes.
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
            raise UsageError(f"the tool {name!r} cannot be called", "its name cannot be written in the model's form")
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
    """The schema of a call as an object. References within the arguments' schema are its own: it has an id."""
    arguments = {"$id": f"tool:{name}", "type": "object", "properties": {}, **schema}
    properties = dict(zip(keys, ({"const": name}, arguments), strict=True))
    return {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}


def before_answer(
    form: MessageFormat, special_tokens: SpecialTokens, place: ReasoningPlace, *, is_text: bool = True
) -> str | None:
    """The part of a message before what was asked of it: its reasoning, if it has any; None: nothing.

    Args:
        place: where in the reasoning the prompt ends.
        is_text: it was asked for a text, not for calls.
    """
    lark = Lark(special_tokens)
    before = _before(lark, form, place, is_text=is_text)
    if form.calls is HARMONY and is_text:
        before = f"{before} {lark.text(FINAL)}"
    return lark.source(before) if before else None


def _before(lark: Lark, form: MessageFormat, place: ReasoningPlace, *, is_text: bool) -> str:
    """The rule of that; empty if there is nothing. Where calls are wanted, none begins in the reasoning."""
    if form.calls is HARMONY:
        begun = " | ".join(lark.text(one) for one in PREAMBLES)
        return f"(({begun}) {lark.free(NEXT)}){{0,{MAX_PREAMBLES}}}"
    if form.reasoning is None or place is ReasoningPlace.OVER:
        return ""
    opening = "" if is_text or form.calls is None else form.calls.open
    space = lark.terminal(r"/\s{0,4}/")
    thought = f"{lark.free(form.reasoning.close, without=(opening,) if opening else ())} {space}"
    return thought if place is ReasoningPlace.BEGUN else f"({lark.text(form.reasoning.open)} {thought})?"
