"""Grammars of messages that have to call tools, in llguidance's Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.messages.calls import Schemas
from enginewright.runtime.messages.parser import MessageFormat
from enginewright.runtime.structured_outputs import StructuredOutputsParams

MAX_CALLS = 16  # of a message that is made to call


def forced_calls(
    form: MessageFormat, schemas: Schemas, special_tokens: Mapping[str, int], *, several: bool
) -> StructuredOutputsParams:
    """A message of calls alone, after reasoning if the model writes any.

    Args:
        schemas: of the tools that may be called, one at least.
        special_tokens: ids of the marks that are special tokens, which no text of a grammar matches.
        several: there may be more calls than one.

    Raises:
        UsageError: the model writes its calls in a form that no grammar is known for.
    """
    if form.calls is None or form.calls.written is None:
        raise UsageError("this model cannot be made to call a tool", "no grammar is known for the form of its calls")
    written = form.calls.written

    def lark(text: str) -> str:
        return " ".join(_terms(text, special_tokens)) or '""'

    calls = [
        " ".join(
            (
                lark(written.before_name + name + written.before_arguments),
                "%json " + json.dumps({**_object(schema), "x-guidance": {"whitespace_flexible": False}}),
                lark(written.after_arguments),
            )
        )
        for name, schema in schemas.items()
    ]
    more = f"({lark(written.between)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    rules = [f"start: {'reasoning? ' if form.reasoning else ''}{lark(written.first)} call {more} {lark(written.last)}"]
    rules += ["call: " + " | ".join(f"call_{place}" for place in range(len(calls)))]
    rules += [f"call_{place}: {call}" for place, call in enumerate(calls)]
    if form.reasoning is not None:
        close = form.reasoning.close
        if close in special_tokens:
            rules += [f"reasoning: THOUGHT {lark(close)} SPACE", "THOUGHT: /(.|\\n)*/"]
        else:
            rules += ["reasoning: thought SPACE", f"thought[suffix={json.dumps(close)}]: /(.|\\n)*/"]
        rules += ["SPACE: /\\s{0,4}/"]
    return StructuredOutputsParams(grammar="\n".join(rules))


def _terms(text: str, special_tokens: Mapping[str, int]) -> Iterable[str]:
    marks = "|".join(map(re.escape, special_tokens))
    for piece in re.split(f"({marks})", text) if marks else [text]:
        if piece in special_tokens:
            yield f"<[{special_tokens[piece]}]>"
        elif piece:
            yield json.dumps(piece, ensure_ascii=False)


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments, which are an object whatever it says."""
    return {"type": "object", "properties": {}, **schema}
