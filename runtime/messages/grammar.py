"""Grammars of messages with calls or reasoning, in llguidance's Lark."""

import re
from collections.abc import Mapping

from enginewright.errors import UsageError
from enginewright.runtime.messages.calls import CallFormat, Schemas
from enginewright.runtime.messages.harmony import FINAL, HARMONY, NEXT, PREAMBLES
from enginewright.runtime.messages.lark import ANY, Lark
from enginewright.runtime.messages.parser import MessageFormat, ReasoningPlace

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


def _block(lark: Lark, calls: CallFormat, schemas: Schemas, *, several: bool, begun: str = "") -> str:
    """The rule of one call, or of several behind one another.

    Args:
        begun: what has come of it.
    """
    written = calls.written
    first, before_name = written.first, written.before_name
    if begun and first:
        first = first.removeprefix(begun)
    elif begun:
        before_name = before_name.removeprefix(begun)
    rules = []
    for name, schema in schemas.items():
        if not re.fullmatch(written.name, name):
            raise UsageError(f"the tool {name!r} cannot be called", "its name cannot be written in the model's form")
        arguments = written.arguments.rule(lark, schema)
        before = lark.text(before_name + name + written.before_arguments)
        rules.append(lark.rule(f"{before} {arguments} {lark.text(written.after_arguments)}"))
    call = lark.rule(" | ".join(rules))
    more = ""
    if several and written.between is not None:
        more = f"({lark.text(written.between)} {call}){{0,{MAX_CALLS - 1}}}"
    return f"{lark.text(first)} {call} {more} {lark.text(written.last)}"


def before_answer(
    form: MessageFormat, special_tokens: SpecialTokens, place: ReasoningPlace, *, is_text: bool = True
) -> str | None:
    """What a message begins with before what was asked of it: its reasoning, if it has any; None: nothing.

    Args:
        place: where in the reasoning the prompt ends.
        is_text: it was asked for a text, not for calls.
    """
    lark = Lark(special_tokens)
    if form.calls is HARMONY:
        begun = " | ".join(lark.text(one) for one in PREAMBLES)
        final = lark.text(FINAL) if is_text else ""
        return lark.source(f"(({begun}) {lark.free(NEXT)}){{0,{MAX_PREAMBLES}}} {final}")
    if form.reasoning is None or place is ReasoningPlace.OVER:
        return None
    space = lark.terminal(r"/\s{0,4}/")
    thought = f"{lark.free(form.reasoning.close)} {space}"
    if place is ReasoningPlace.BEGUN:
        return lark.source(thought)
    return lark.source(f"({lark.text(form.reasoning.open)} {thought})?")
