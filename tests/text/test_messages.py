"""Messages cut into reasoning, text and calls: each family's way of writing them, wherever a stream is cut."""

import json
import random
import re
from collections.abc import Sequence

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.text.detokenizer import Detokenizer
from enginewright.runtime.text.messages.bare import typed
from enginewright.runtime.text.messages.calls import ArgumentsPiece, CallFormat, CallOutcomes, CallPiece, WrittenCalls
from enginewright.runtime.text.messages.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from enginewright.runtime.text.messages.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    call_format,
    message_format,
    new_parser,
)
from enginewright.runtime.text.messages.gemma import FUNCTION_GEMMA, GEMMA4
from enginewright.runtime.text.messages.glm import GLM, GLM47
from enginewright.runtime.text.messages.harmony import FINAL, HARMONY
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.json_calls import read_calls
from enginewright.runtime.text.messages.llama3_json import LLAMA3_JSON
from enginewright.runtime.text.messages.mistral import MISTRAL, MISTRAL_NAMED
from enginewright.runtime.text.messages.parser import (
    MessageFormat,
    MessageParser,
    Piece,
    ReasoningPiece,
    TextPiece,
    joined,
)
from enginewright.runtime.text.messages.pythonic import LFM2, PYTHONIC
from enginewright.runtime.text.messages.qwen3_xml import QWEN3_XML
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.helpers.breadth import every_third
from tests.helpers.tiny import MemoryCheckpoint

THINK = REASONING_FORMATS[0]
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {},
}
# A text that holds what ends calls, quotes and escapes.
CITY = 'Sankt "Pölten" \\ </tool_call> ] } it\'s\nnew'
WEATHER = {"city": CITY, "days": 3}
ADD = {"a": 1, "b": [1.5, None, True, {"c": "d"}]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _hermes(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'


def _v3(name: str, arguments: object) -> str:
    return (
        f"<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n"
        f"```json\n{_json(arguments)}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
    )


def _v31(name: str, arguments: object) -> str:
    return (
        f"<\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>{_json(arguments)}"
        "<\uff5ctool\u2581call\u2581end\uff5c>"
    )


def _deepseek(*calls: str) -> str:
    return "".join(("<\uff5ctool\u2581calls\u2581begin\uff5c>", *calls, "<\uff5ctool\u2581calls\u2581end\uff5c>"))


PLAIN = {"city": "Graz\nand 'more' \"quoted\"", "days": 3}  # where nothing marks the end of a text but the call's own
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nGraz\nand 'more' \"quoted\"\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
XML_ADD = f"<tool_call><function=add><parameter=a>1</parameter><parameter=b>{_json(ADD['b'])}</function></tool_call>"
ARGS = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Graz\nand 'more' \"quoted\"</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
ARGS_ADD = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    f"<arg_key>b</arg_key><arg_value>{_json(ADD['b'])}</arg_value></tool_call>"
)
ARGS47, ARGS47_ADD = (text.replace("\n<arg", "<arg").replace("\n</tool", "</tool") for text in (ARGS, ARGS_ADD))


def _gemma(open: str, close: str, quote: str, name: str, arguments: dict[str, object]) -> str:
    """Writes a call in the form of Gemma's template: keys are bare, and strings stand between `quote`s."""

    def written(value: object) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case dict():
                return f"{{{','.join(f'{key}:{written(one)}' for key, one in value.items())}}}"
            case list():
                return f"[{','.join(map(written, value))}]"
        return str(value) if value is None else _json(value)

    return f"{open}call:{name}{written(arguments)}{close}"


BOTH = (("weather", WEATHER), ("add", ADD))
PLAIN_BOTH = (("weather", PLAIN), ("add", ADD))
# A format, two calls as it writes them, and what they are.
CASES = {
    "hermes": (HERMES, "\n".join(_hermes(*one) for one in BOTH), BOTH),
    "qwen3_xml": (QWEN3_XML, f"{XML}\n{XML_ADD}", PLAIN_BOTH),
    "glm": (GLM, f"{ARGS}\n{ARGS_ADD}", PLAIN_BOTH),
    "glm47": (GLM47, ARGS47 + ARGS47_ADD, PLAIN_BOTH),
    "gemma4": (
        GEMMA4,
        "".join(_gemma("<|tool_call>", "<tool_call|>", '<|"|>', *one) for one in BOTH),
        BOTH,
    ),
    "function_gemma": (
        FUNCTION_GEMMA,
        "".join(_gemma("<start_function_call>", "<end_function_call>", "<escape>", *one) for one in BOTH),
        BOTH,
    ),
    "mistral": (
        MISTRAL,
        "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in BOTH]),
        BOTH,
    ),
    "mistral_named": (
        MISTRAL_NAMED,
        "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in BOTH),
        BOTH,
    ),
    "deepseek_v3": (DEEPSEEK_V3, _deepseek("\n".join(_v3(*one) for one in BOTH)), BOTH),
    "deepseek_v31": (DEEPSEEK_V31, _deepseek(*(_v31(*one) for one in BOTH)), BOTH),
    "lfm2": (LFM2, f"<|tool_call_start|>[{', '.join(_python(*one) for one in BOTH)}]<|tool_call_end|>", BOTH),
    "pythonic": (PYTHONIC, f"[{', '.join(_python(*one) for one in BOTH)}]", BOTH),
    "llama3_json": (
        LLAMA3_JSON,
        "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in BOTH),
        BOTH,
    ),
}


STREAMED = [name for name, (calls, _, _) in CASES.items() if calls.is_streamed]


def parse(
    form: MessageFormat, pieces: Sequence[str], *, tools: bool = True, is_cut: bool = False, **options: bool
) -> list[Piece]:
    """The parsed pieces of a message, with adjacent texts joined, and arguments joined to their call."""
    parser = new_parser(form, TOOLS if tools else None, **options)
    if parser is None:
        return [TextPiece("".join(pieces))]
    found = [piece for text in pieces for piece in parser.push(text)] + parser.end(is_cut=is_cut)
    whole: list[Piece] = []
    for piece in found:
        if whole and isinstance(piece, TextPiece) and isinstance(whole[-1], TextPiece):
            whole[-1] = TextPiece(whole[-1].text + piece.text)
        elif whole and isinstance(piece, ReasoningPiece) and isinstance(whole[-1], ReasoningPiece):
            whole[-1] = ReasoningPiece(whole[-1].text + piece.text)
        elif isinstance(piece, ArgumentsPiece):
            assert isinstance(whole[-1], CallPiece) and piece.text
            whole[-1] = CallPiece(whole[-1].name, whole[-1].arguments + piece.text)
        else:
            whole.append(piece)
    return whole


def values(pieces: Sequence[Piece]) -> list[tuple[str, object]]:
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, CallPiece)]


def cuts(text: str) -> list[list[str]]:
    """The text in two, at each place, and character by character."""
    return [[text[:place], text[place:]] for place in range(len(text) + 1)] + [list(text)]


def test_each_format_has_a_case() -> None:
    assert {*CASES, "harmony"} == {one.name for one in CALL_FORMATS}


HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize("end", ["<|call|>", ""])  # which ends the answer, and is no text then
def test_harmony_wherever_the_stream_is_cut(end: str) -> None:
    other = f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{_json(WEATHER)}"
    message = (
        f"<|channel|>analysis<|message|>Hm, <|.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{HARMONY_CALL}{_json(ADD)}<|call|>{other}{end}"
    )
    for pieces in cuts(message):
        found = parse(MessageFormat(None, HARMONY), pieces)
        assert found[:2] == [ReasoningPiece("Hm, <|."), TextPiece("I look.")], pieces
        assert values(found) == [("add", ADD), ("weather", WEATHER)], pieces
    for pieces in cuts(
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    ):
        assert parse(MessageFormat(None, HARMONY), pieces, tools=False) == [ReasoningPiece("So."), TextPiece("Yes.")], (
            pieces
        )


def test_harmony_loses_nothing() -> None:
    form = MessageFormat(None, HARMONY)
    for text in (
        f"{HARMONY_CALL}[1]",
        f"{HARMONY_CALL}no JSON",
        "<|channel|>comment",
        "Hello <|chan",
        "<|start|>" * 150,
    ):
        for pieces in cuts(text):
            assert parse(form, pieces) == [TextPiece(text)], pieces
    for pieces in cuts(f"{HARMONY_CALL}{_json(ADD)}"):  # nothing may be called
        assert parse(form, pieces, tools=False) == [TextPiece(f"{HARMONY_CALL}{_json(ADD)}")]
    parser = new_parser(form, TOOLS, several=False)
    assert parser is not None
    found = parser.push(f"{HARMONY_CALL}{{}}<|call|>" * 3) + parser.end()
    assert joined(found) == [CallPiece("add", ""), ArgumentsPiece("{}")]
    for pieces in cuts(f"{HARMONY_CALL}  "):
        assert parse(form, pieces) == [CallPiece("add", "{}")]
    for pieces in cuts(f'{HARMONY_CALL} {{"a": \n'):  # cut off
        assert parse(form, pieces) == [CallPiece("add", '{"a": \n')]


@pytest.mark.parametrize("name", CASES)
def test_calls_wherever_the_stream_is_cut(name: str) -> None:
    calls, text, expected = CASES[name]
    form = MessageFormat(THINK, calls)
    lead = "" if calls.begins else "I look.\n\n"
    message = f"<think>\nHm, <b> or\n <c>?\n</think>\n\n{lead}{text}"
    for pieces in cuts(message):
        found = parse(form, pieces)
        assert found[0] == ReasoningPiece("Hm, <b> or\n <c>?"), pieces
        assert found[1:-2] == ([TextPiece("I look.")] if lead else []), pieces
        assert values(found) == [*expected], pieces


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_call_stays_as_it_was_written(name: str) -> None:
    calls, text, expected = CASES[name]
    form = MessageFormat(None, calls)
    for end in range(1, len(text)):  # an answer that the model ends there
        whole = parse(form, [text[:end]])
        assert whole == parse(form, list(text[:end]))
        given = [piece for piece in whole if isinstance(piece, CallPiece)]
        if not given:
            assert whole == [TextPiece(text[:end])]
        for call, (tool, arguments) in zip(given, expected, strict=False):
            assert call.name == tool
            is_cut = call is given[-1] and (name not in STREAMED or _json(arguments).startswith(call.arguments))
            assert is_cut or call.arguments == _json(arguments)
    assert parse(form, [text], tools=False) == [TextPiece(text)]  # nothing may be called


HARMONY_BOTH = f"{HARMONY_CALL}{_json(ADD)}"
CUT = {**{name: case[:2] for name, case in CASES.items()}, "harmony": (HARMONY, HARMONY_BOTH)}


LEADS = ("", "I look.\n\n", "<think>\nHm.\n</think>\n\nI look.\n")
CUT_AFTER = [(name, lead) for name in CUT for lead in LEADS]
SOME_CUT_AFTER = every_third(CUT, LEADS)


@pytest.mark.parametrize(("name", "lead"), SOME_CUT_AFTER)
def test_nothing_of_a_call_is_text_wherever_it_is_cut(name: str, lead: str) -> None:
    calls, text = CUT[name]
    if calls is HARMONY and lead:
        lead = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{FINAL}I look.<|end|><|start|>assistant"
    elif calls.begins and "look" in lead:
        lead = lead[: lead.index("I look")]
    form = MessageFormat(THINK, calls)
    whole = [piece for piece in parse(form, [lead + text]) if isinstance(piece, CallPiece)]
    for end in range(1, len(text) + 1):
        message = lead + text[:end]
        found = parse(form, [message], is_cut=True)
        assert parse(form, list(message), is_cut=True) == found
        assert "".join(piece.text for piece in found if isinstance(piece, TextPiece)) == (
            "I look." if "look" in lead else ""
        )
        given = [piece for piece in found if isinstance(piece, CallPiece)]
        assert given[:-1] == whole[: len(given[:-1])]
        if given:
            last = whole[len(given) - 1]
            assert given[-1].name == last.name and last.arguments.startswith(given[-1].arguments)
        else:
            assert end < text.index("3" if name != "harmony" else "1"), "arguments that have come are given"


@pytest.mark.parametrize(
    ("calls", "text", "found"),
    [
        (HERMES, '<tool_call>\n{"name": "weather', []),
        (HERMES, '<tool_call>\n{"name": "weather"', [CallPiece("weather", "")]),
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Gr', [CallPiece("weather", '{"city": "Gr')]),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_', [CallPiece("add", "{}")]),
        (QWEN3_XML, "<tool_call>\n<function=weather", []),
        (QWEN3_XML, "<tool_call>\n<function=weather>\n<parameter=city>\nGr", [CallPiece("weather", '{"city": "Gr')]),
        (GLM, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</", [CallPiece("add", '{"a": 1')]),
        (GEMMA4, "<|tool_call>call:add{a:[1,2", [CallPiece("add", '{"a": [1, ')]),
        (PYTHONIC, "[add(a=1, b=", [CallPiece("add", '{"a": 1, "b": ')]),
        (HERMES, "So <tool_call> oh, no", [TextPiece("So <tool_call> oh, no")]),
        (LLAMA3_JSON, '{"temperature": 20, "unit": "C', [TextPiece('{"temperature": 20, "unit": "C')]),
        (LLAMA3_JSON, '{"name": "Ann", "age": 20', [TextPiece('{"name": "Ann", "age": 20')]),
    ],
)
def test_how_much_of_a_call_that_is_cut_is_given(calls: CallFormat, text: str, found: list[Piece]) -> None:
    """Nothing before its name is known, then its arguments as far as they came; text where it can be no call."""
    for pieces in cuts(text):
        assert parse(MessageFormat(None, calls), pieces, is_cut=True) == found, pieces


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def outcomes(calls: CallFormat, pieces: Sequence[str], *, is_cut: bool = False, **options: bool) -> CallOutcomes:
    """Counts of the calls of a message, by their end."""
    parser = new_parser(MessageFormat(THINK, calls), TOOLS, **options)
    assert parser is not None and parser.may_call
    for text in pieces:
        parser.push(text)
    parser.end(is_cut=is_cut)
    return parser.outcomes


@pytest.mark.parametrize("name", CUT)
def test_calls_are_counted_once_wherever_they_are_cut(name: str) -> None:
    calls, text = CUT[name]
    num_calls = 1 if name == "harmony" else len(CASES[name][2])
    assert outcomes(calls, [text]) == outcomes(calls, list(text)) == CallOutcomes(parsed=num_calls)
    for end in range(1, len(text), 5):
        message = text[:end]
        found = outcomes(calls, [message], is_cut=True)
        assert found == outcomes(calls, list(message), is_cut=True), message
        given = [
            one for one in parse(MessageFormat(THINK, calls), [message], is_cut=True) if isinstance(one, CallPiece)
        ]
        complete = [one for one in given if _is_json(one.arguments)]
        assert found.parsed == len(complete) and found.malformed == 0, message
        assert len(given) - len(complete) <= found.cut <= 1, message  # one may be cut before its name


@pytest.mark.parametrize(
    ("calls", "text", "found"),
    [
        (HERMES, "So <tool_call> oh, no", CallOutcomes(malformed=1)),
        (HERMES, "<think>\nA <tool_call> oh, no\n</think>\nNo.", CallOutcomes()),  # it reasons about calls
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', CallOutcomes(malformed=1)),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', CallOutcomes(malformed=1)),  # the model ends there
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, oh}}</tool_call>', CallOutcomes(malformed=1)),
        (HERMES, f'{_hermes("add", {})}\n<tool_call>{{"name": 3}}</tool_call>', CallOutcomes(parsed=1, malformed=1)),
        (HERMES, f"{_hermes('add', {})}\nDone.\n{_hermes('other', {})}", CallOutcomes(parsed=2)),
        (HERMES, "I add nothing.", CallOutcomes()),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": 3}]', CallOutcomes(parsed=1)),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "add", 3}]', CallOutcomes(1, 0, 1)),
        (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": oh}', CallOutcomes(malformed=1)),
        (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1', CallOutcomes(malformed=1)),
        (DEEPSEEK_V31, _deepseek(_v31("add", ADD).replace("null", "oh")), CallOutcomes(malformed=1)),
        (HARMONY, f"{HARMONY_CALL}no JSON", CallOutcomes(malformed=1)),
        (PYTHONIC, "[add(a=nan)]", CallOutcomes(malformed=1)),
        (PYTHONIC, "[1, 2, 3]", CallOutcomes()),  # a list, which no mark makes a call
        (LLAMA3_JSON, '{"temperature": 20, "unit": "C"}', CallOutcomes()),  # an answer as JSON
        (LLAMA3_JSON, '{"name": "Ann", "age": 20}', CallOutcomes()),
        (LLAMA3_JSON, '{"name": "add", "parameters": [1]}', CallOutcomes(malformed=1)),
    ],
)
def test_which_calls_are_malformed(calls: CallFormat, text: str, found: CallOutcomes) -> None:
    for pieces in cuts(text):
        assert outcomes(calls, pieces) == found, pieces


def test_calls_that_do_not_count_have_no_outcome() -> None:
    text = f"{_hermes('add', {})}\n" * 3
    assert outcomes(HERMES, [text], several=False) == CallOutcomes(parsed=1)
    broken = f'{_hermes("add", {})}\n{_hermes("add", {})}\n<tool_call>{{"name": "add", "arguments": {{"a": '
    assert outcomes(HERMES, [broken], is_cut=True, several=False) == CallOutcomes(parsed=1)
    assert outcomes(HERMES, [broken], is_cut=True) == CallOutcomes(parsed=2, cut=1)
    assert outcomes(HERMES, [broken], is_cut=True, only_first=True) == CallOutcomes(parsed=2, cut=1)


def _refuse(constant: str) -> None:
    raise AssertionError(f"JSON has no {constant}")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"a": "\ud800", "b": "\ud83d\ude42"}', r'{"a": "\ud800", "b": "\ud83d\ude42"}'),
        ('{"a": NaN, "b": [Infinity, -Infinity], "NaN": "NaN"}', '{"a": null, "b": [null, null], "NaN": "NaN"}'),
        ('{"a": 1e999, "b": 123456789012345678901234567890}', '{"a": 1e999, "b": 123456789012345678901234567890}'),
        ('{"a": "x\ny\t\x01"}', r'{"a": "x\ny\t\u0001"}'),
        (r'{"a": "C:\dir\u12", "b": "\""}', r'{"a": "C:\\dir\\u12", "b": "\""}'),
    ],
)
@pytest.mark.parametrize("tool", ["add", "other"])  # streamed, and whole
def test_arguments_are_json_whatever_numbers_and_characters_a_model_writes(
    written: str, arguments: str, tool: str
) -> None:
    json.loads(arguments, parse_constant=_refuse)
    assert arguments.encode().decode() == arguments
    for calls, text in (
        (HERMES, f'<tool_call>{{"name": "{tool}", "arguments": {written}}}</tool_call>'),
        (HARMONY, f"{HARMONY_CALL.replace('add', tool)}{written}<|call|>"),
        (MISTRAL_NAMED, f"[TOOL_CALLS]{tool}[ARGS]{written}"),
    ):
        for pieces in cuts(text):
            assert parse(MessageFormat(None, calls), pieces) == [CallPiece(tool, arguments)], pieces


@pytest.mark.parametrize(
    ("calls", "text", "arguments"),
    [
        (
            PYTHONIC,
            r"""[add(a="\ud800", b='\x41\101\d', c=1e999, d=(1, 2), e=0x1f, f={1: None})]""",
            r'{"a": "\ud800", "b": "AA\\d", "c": 1e999, "d": [1, 2], "e": 31, "f": {"1": null}}',
        ),
        (PYTHONIC, "[add(a=float('nan'))]", None),
        (PYTHONIC, "[add(a=nan)]", None),
        (PYTHONIC, "[add(a=5.e999)]", None),
        (
            PYTHONIC,
            '[add(a=(1), b="x" "y", c="""p"q""", d=-5, e=1_0, f=.5, g=[], h=(3,),)]',
            '{"a": 1, "b": "xy", "c": "p\\"q", "d": -5, "e": 10, "f": 0.5, "g": [], "h": [3]}',
        ),
        (
            GEMMA4,
            r'<|tool_call>call:add{a:"\ud800",b:NaN,c:1e999}<tool_call|>',
            r'{"a": "\ud800", "b": "NaN", "c": 1e999}',
        ),
        (
            GLM47,
            "<tool_call>add<arg_key>a</arg_key><arg_value>NaN</arg_value><arg_key>b</arg_key>"
            r'<arg_value>["\ud800", 1e999]</arg_value></tool_call>',
            r'{"a": "NaN", "b": ["\ud800", 1e999]}',
        ),
        (
            QWEN3_XML,
            "<tool_call><function=add><parameter=a>\n-Infinity\n</parameter></function></tool_call>",
            '{"a": "-Infinity"}',
        ),
    ],
)
def test_values_of_other_forms_are_json(calls: CallFormat, text: str, arguments: str | None) -> None:
    for pieces in cuts(text):
        expected = TextPiece(text) if arguments is None else CallPiece("add", arguments)
        assert parse(MessageFormat(None, calls), pieces) == [expected], pieces


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call> and more',
        "<tool_call>no JSON</tool_call> and more",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_is_text(broken: str) -> None:
    assert parse(MessageFormat(THINK, HERMES), [broken]) == [TextPiece(broken)]


@pytest.mark.parametrize("name", [*STREAMED, "harmony"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    """After the name, each character of the arguments comes as soon as it is pushed, and together they are the text."""
    if name == "harmony":
        calls, text, expected = HARMONY, f"{HARMONY_CALL}{_json(ADD)}<|call|>", (("add", ADD),)
    else:
        calls, text, expected = CASES[name]  # type: ignore[assignment]
    parser, taken = new_parser(MessageFormat(None, calls), TOOLS), ""
    assert parser is not None
    written: list[str] = []
    for char in text:
        taken += char
        for piece in parser.push(char):
            if isinstance(piece, CallPiece):
                assert piece == CallPiece(expected[len(written)][0], "")
                written.append("")
            elif isinstance(piece, ArgumentsPiece):
                written[-1] += piece.text
                assert taken.endswith(written[-1][-1] or char)
    assert parser.end() in ([], [TextPiece("]")]) and written == [_json(arguments) for _, arguments in expected]


@pytest.mark.parametrize("arguments", ['{"a": 1, oh}', '{"a": [1}', '{"a": "x', '{"a": 1', "{", '{"a": "\\'])
@pytest.mark.parametrize("name", STREAMED)
def test_arguments_that_are_no_json(name: str, arguments: str) -> None:
    """Arguments that are not JSON are given as they are, up to the marker that ends the call, or the message's end."""
    calls, text, _ = CASES[name]
    beginning = text[: text.index("{", text.index("weather"))]
    for pieces in cuts(beginning + arguments):
        assert parse(MessageFormat(None, calls), pieces) == [CallPiece("weather", arguments)], pieces
    if calls.close and not arguments.count('"') % 2:
        for pieces in cuts(f"{beginning}{arguments}{calls.close} and more"):
            assert parse(MessageFormat(None, calls), pieces) == [
                CallPiece("weather", arguments),
                TextPiece("and more"),
            ], pieces


def test_calls_of_tools_that_there_are_not_come_whole() -> None:
    call = _hermes("other", ADD)
    for pieces in cuts(call):
        (found,) = new_parser(MessageFormat(None, HERMES), TOOLS).push(call)  # type: ignore[union-attr]
        assert found == CallPiece("other", _json(ADD)) == parse(MessageFormat(None, HERMES), pieces)[0]
    (text,) = parse(MessageFormat(None, HERMES), [call.replace("1.5", "oh")])
    assert isinstance(text, TextPiece)


@pytest.mark.parametrize(
    ("written", "after"),
    [
        ('{"name": "add", "arguments": {}, "id": "x"}', ""),
        ('{"name":"add","parameters":{}}', ""),
        ('[{"name": "add", "arguments": {}}]', ""),
        ('{"name": "add", "arguments": {}', ""),
        ('{"name": "add", "arguments": {}} so', "} so</tool_call>"),
    ],
)
def test_what_stands_around_arguments(written: str, after: str) -> None:
    for pieces in cuts(f"<tool_call>{written}</tool_call>"):
        found = parse(MessageFormat(None, HERMES), pieces)
        assert found == [CallPiece("add", "{}"), *([TextPiece(after)] if after else [])], pieces


def test_two_calls_without_the_mark_between() -> None:
    for pieces in cuts('<tool_call>{"name": "add", "arguments": {}}<tool_call>{"name": "add", "arguments": {}}'):
        assert parse(MessageFormat(None, HERMES), pieces) == [CallPiece("add", "{}")] * 2


def test_a_call_that_ends_after_its_name_is_given_where_the_message_is_cut_alone() -> None:
    first = '<tool_call>{"name": "add", "arguments": {}}, {"name": "weather"'
    for pieces in cuts(first):
        assert parse(MessageFormat(None, HERMES), pieces) == [CallPiece("add", "{}")]
        assert parse(MessageFormat(None, HERMES), pieces, is_cut=True) == [
            CallPiece("add", "{}"),
            CallPiece("weather", ""),
        ]


@pytest.mark.parametrize("form", [MessageFormat(THINK), MessageFormat(THINK, HERMES)])
def test_reasoning_at_the_beginning_alone(form: MessageFormat) -> None:
    """Only reasoning at the start counts for an answer whose strings may contain marks."""
    answer = '{"x": "<think>a</think> <tool_call>"}'
    for pieces in cuts(f" <think>\nSo.</think>\n{answer}"):
        assert parse(form, pieces, only_first=True) == [ReasoningPiece("So."), TextPiece(answer)], pieces
    for pieces in cuts(f"So.</think>{answer}"):
        assert parse(form, pieces, only_first=True, in_reasoning=True) == [ReasoningPiece("So."), TextPiece(answer)], (
            pieces
        )
    for text in (answer, " <thin", "  ", ""):
        for pieces in cuts(text):
            assert parse(form, pieces, only_first=True) == ([TextPiece(text)] if text else []), pieces


def test_a_call_in_the_reasoning_ends_it() -> None:
    form, call = MessageFormat(THINK, HERMES), _hermes("add", ADD)
    for pieces in cuts(f"\nI add.\n{call}\n</think>\n\nDone."):
        found = parse(form, pieces, in_reasoning=True)
        assert found[0] == ReasoningPiece("I add.") and values(found) == [("add", ADD)], pieces
    mentioned = 'The form is <tool_call>{"name": …}</tool_call>, or <tool_call>.'
    for pieces in cuts(f"{mentioned}\n</think>\n\nDone."):
        assert parse(form, pieces, in_reasoning=True) == [ReasoningPiece(mentioned), TextPiece("Done.")], pieces


def test_a_call_in_place_of_one_that_never_ended() -> None:
    call = _hermes("add", ADD)
    for pieces in cuts(f"<tool_call> oh, {call}"):
        found = parse(MessageFormat(None, HERMES), pieces)
        assert found[0] == TextPiece("<tool_call> oh,") and values(found) == [("add", ADD)], pieces


@pytest.mark.parametrize("text", ["", " a", "a \n", "<", "a < b", "</think>", "  <th", "\\", '"'])
def test_text_alone_is_unchanged(text: str) -> None:
    for pieces in cuts(text):
        assert parse(MessageFormat(THINK, HERMES), pieces) == ([TextPiece(text)] if text else [])


def test_reasoning_that_the_prompt_has_begun() -> None:
    for pieces in cuts("\nSo.\n\n</think>\n\nYes."):
        assert parse(MessageFormat(THINK), pieces, in_reasoning=True) == [ReasoningPiece("So."), TextPiece("Yes.")]
    assert parse(MessageFormat(THINK), ["So."], in_reasoning=True) == [ReasoningPiece("So.")]  # its tokens have ended


def test_arguments_follow_the_schema() -> None:
    text = "<tool_call><function=weather><parameter=city>12</parameter><parameter=days>12</function></tool_call>"
    (call,) = parse(MessageFormat(None, QWEN3_XML), [text])
    assert isinstance(call, CallPiece) and json.loads(call.arguments) == {"city": "12", "days": 12}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"$ref": "#/$defs/word"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "2"]}, "1", 1),
        ({"allOf": [{"$ref": "#/$defs/word"}]}, "12", "12"),
        ({"$ref": "#/$defs/itself"}, "12", 12),
        ({"$ref": "other.json"}, "12", 12),
        ({"allOf": [{}, {}]}, "12", 12),
        (True, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
    ],
    ids=str,
)
def test_bare_arguments_are_of_the_type_that_their_schema_has(schema: object, text: str, value: object) -> None:
    root = {"properties": {"a": schema}, "$defs": {"word": {"type": "string"}, "itself": {"$ref": "#/$defs/itself"}}}
    found = json.loads(typed(text, root, "a"))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{}", {}),
        ("{ a : 1 , b : [ true , None ] }", {"a": 1, "b": [True, None]}),
        ('{<|"|>a b<|"|>:<|"|>{x: <|"|>}', {"a b": "{x: "}),
        ('{a:"b\\n"}', {"a": "b\n"}),
        ("{a:Graz, b:{c:[]}}", {"a": "Graz", "b": {"c": []}}),
        *(
            (text, None)
            for text in ("", "{", "[1]", "{a}", "{a:}", "{a:1}}", "{a:1 b", '{a:<|"|>x}', "{a:[1}", '{a:"}')
        ),
        ('{<|"|>a<|"|> x:1}', None),
        ("{a:" + "[" * 1000, None),
        ("{a:" + "[" * 1000 + "]" * 1000 + "}", None),
    ],
)
def test_arguments_as_gemma_writes_them(written: str, value: object) -> None:
    text = f"<|tool_call>call:add{written}<tool_call|>"
    found = parse(MessageFormat(None, GEMMA4), [text])
    assert found == [TextPiece(text)] if value is None else values(found) == [("add", value)]


def test_one_call_where_several_are_not_wanted() -> None:
    parser = MessageParser(MessageFormat(None, HERMES), TOOLS, several=False)
    found = parser.push(_hermes("add", ADD) + _hermes("add", {})) + parser.end()
    assert joined(found) == [CallPiece("add", ""), ArgumentsPiece(_json(ADD))]


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)
def test_random_marks_lose_nothing(calls: CallFormat) -> None:
    """Texts of marks, calls in pieces, quotes and letters: cut anywhere, the same; what is no call or reasoning is all
    there.
    """
    rng, form = random.Random(7), MessageFormat(THINK, calls)
    text = HARMONY_CALL + "{}<|call|>" if calls is HARMONY else CASES[calls.name][1]
    parts = re.split(r"([\s{}\[\]\"(),:=]|(?<=[>\uff5c]))", text)  # type: ignore[arg-type]
    words = [
        *filter(None, dict.fromkeys((*parts, *form.marks, calls.begins))),
        "add",
        '"',
        "\\",
        "x",
        " ",
        "\n",
        "<",
        "}",
        "{}",
    ]
    for number in range(400):
        count = rng.randint(1, 12)
        text = rng.choice(("", calls.open, calls.begins)) + "".join(rng.choices(words, k=count))
        options = {"in_reasoning": number % 5 == 0, "only_first": number % 7 == 0, "several": number % 3 > 0}
        options["is_cut"] = number % 2 > 0
        whole = parse(form, [text], **options)
        place = rng.randint(0, len(text))
        assert parse(form, list(text), **options) == parse(form, [text[:place], text[place:]], **options) == whole
        is_plain = not (options["is_cut"] or options["in_reasoning"] or "think>" in text or calls is HARMONY)
        if is_plain and all(isinstance(piece, TextPiece) for piece in whole):
            assert whole == ([TextPiece(text)] if text else [])


TEMPLATES = {
    "hermes": "{{ '<tool_call>' }} \\\"arguments\\\" {{ '<think></think>' }}",
    "qwen3_xml": "<tool_call><function=name><parameter=key> arguments",
    "glm": "<tool_call><arg_key>{{ arguments }}",
    "glm47": "<tool_call><arg_key>{arg-key-1}</arg_key><arg_value>{{ arguments }}",
    "gemma4": "<|tool_call>call:",
    "function_gemma": "<start_function_call>call:",
    "mistral": "[TOOL_CALLS]",
    "mistral_named": "[TOOL_CALLS]{{ name }}[ARGS]",
    "deepseek_v3": "<\uff5ctool\u2581call\u2581begin\uff5c><\uff5ctool\u2581sep\uff5c>```json",
    "deepseek_v31": "<\uff5ctool\u2581call\u2581begin\uff5c><\uff5ctool\u2581sep\uff5c>",
    "lfm2": "<|tool_list_start|>",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "harmony": "<|channel|>analysis<|message|>",
    "llama3_json": "<|start_header_id|> dictionary of argument name and its value",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_format(name: str) -> None:
    found = message_format(TEMPLATES[name]).calls
    assert isinstance(found, CallFormat) and found is call_format(name)


def test_templates_without() -> None:
    assert message_format(None) == message_format("{{ messages }}") == MessageFormat()
    assert message_format(TEMPLATES["hermes"]).reasoning == THINK
    with pytest.raises(UsageError, match="no tool call parser 'x'"):
        call_format("x")


def test_marks_are_shown_although_they_are_special_tokens() -> None:
    """Only markers of the format are shown, also where one comes in the middle of a character."""
    files = MemoryCheckpoint({}, {}).tokenizer
    tokenizer = Tokenizer(files.tokenizer_json, {}, None)
    mark, other = (tokenizer.token_id(token) for token in ("<|turn|>", "<|end|>"))
    assert mark in tokenizer.special_ids and other in tokenizer.special_ids
    cut = tokenizer.encode("🙂", add_special_tokens=False)[:1]
    text = tokenizer.encode("a b", add_special_tokens=False)
    tokens = [*text, mark, *text, *cut, mark, other, *text]

    def shown() -> str:
        detokenizer = Detokenizer(tokenizer, text)
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    assert shown() == "a ba b\ufffda b"
    tokenizer = Tokenizer(files.tokenizer_json, {}, None)
    tokenizer.use_message_format(
        MessageFormat(None, CallFormat("turns", (), read_calls, WrittenCalls("", "", ""), open="<|turn|>"))
    )
    assert shown() == "a b<|turn|>a b\ufffd<|turn|>a b"
