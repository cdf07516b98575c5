"""DeepSeek V3, R1 and V3.1: special tokens around calls, names and arguments."""

from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, WrittenCalls
from enginewright.runtime.text.messages.json_text import read_object
from enginewright.runtime.text.messages.source import MessageSource, Reading

_BAR, _SPACE = "\uff5c", "\u2581"  # the full-width bar and the lower block of its special tokens


def _mark(*words: str) -> str:
    return f"<{_BAR}{_SPACE.join(words)}{_BAR}>"


_FIRST, _LAST = _mark("tool", "calls", "begin"), _mark("tool", "calls", "end")
_BEGIN, _SEPARATOR, _END = _mark("tool", "call", "begin"), _mark("tool", "sep"), _mark("tool", "call", "end")


def _read(source: MessageSource, found: FoundCalls) -> Reading[None]:
    """Reads V3's name after "function" and arguments as a block of code, or V3.1's name and arguments."""
    yield from source.space()
    while (yield from source.has(_BEGIN)):
        name = (yield from source.up_to(_SEPARATOR)).strip()
        yield from source.expect(_SEPARATOR)
        yield from source.space()
        if not (yield from source.starts_with("{")):
            name = (yield from source.up_to("\n", _END)).strip()
            found.begin(name)
            yield from source.space()
            yield from source.expect("```json")
            yield from source.space()
        else:
            found.begin(name)
        yield from read_object(source, found.add, _END)
        yield from source.space()
        yield from source.has("```")
        yield from source.space()
        if not (yield from source.has(_END)):
            return
        yield from source.space()


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
        is_streamed=True,
        marks=(_BEGIN, _SEPARATOR, _END),
    )


DEEPSEEK_V3 = _format("deepseek_v3", "```json", f"function{_SEPARATOR}", "\n```json\n", "\n```", "\n")
DEEPSEEK_V31 = _format("deepseek_v31", _SEPARATOR, "", _SEPARATOR, "", "")
