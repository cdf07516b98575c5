"""DeepSeek V3, R1 and V3.1: marks of its own around calls, names and arguments."""

import re

from enginewright.runtime.messages.calls import (
    Call,
    CallFormat,
    Schemas,
    StreamedCalls,
    WrittenCalls,
    json_call,
    load,
)

_BAR, _SPACE = "\uff5c", "\u2581"  # the full-width bar and the lower block of its special tokens


def _mark(*words: str) -> str:
    return f"<{_BAR}{_SPACE.join(words)}{_BAR}>"


_FIRST, _LAST = _mark("tool", "calls", "begin"), _mark("tool", "calls", "end")
_BEGIN, _SEPARATOR, _END = _mark("tool", "call", "begin"), _mark("tool", "sep"), _mark("tool", "call", "end")
_CALL = re.compile(f"{_BEGIN}(.*?){_SEPARATOR}(.*?){_END}", re.DOTALL)
_BEHIND = rf"\s*+(?:```)?\s*+{_END}"  # arguments
_FENCED = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[Call]:
    calls = [_call(kind.strip(), rest) for kind, rest in _CALL.findall(text)]
    if not calls or _CALL.sub("", text).strip():
        raise ValueError("no calls, or more than calls")
    return calls


def _call(kind: str, rest: str) -> Call:
    """V3 writes the name behind "function", and its arguments as a block of code; V3.1 the name, and its arguments."""
    fenced = _FENCED.fullmatch(rest)
    name, arguments = (fenced[1].strip(), fenced[2]) if fenced else (kind, rest)
    return json_call({"name": name, "arguments": load(arguments)})


def _format(name: str, mark: str, before_name: str, before_arguments: str, after: str, between: str) -> CallFormat:
    return CallFormat(
        name,
        (_BEGIN, mark),
        _read,
        WrittenCalls(
            _BEGIN + before_name,
            before_arguments,
            after + _END,
            between=between,
            first=_FIRST,
            last=_LAST,
        ),
        open=_FIRST,
        close=_LAST,
        streamed=StreamedCalls(
            re.compile(rf"(?:{_BEHIND})?\s*+{_BEGIN}{before_name}([^\n<]++){before_arguments}\s*+(?=\{{)"),
            re.compile(rf"{_BEHIND}\s*|\s*"),
        ),
        marks=(_BEGIN, _SEPARATOR, _END),
    )


DEEPSEEK_V3 = _format("deepseek_v3", "```json", f"function{_SEPARATOR}", "\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = _format("deepseek_v31", _SEPARATOR, "", _SEPARATOR, "", "")
