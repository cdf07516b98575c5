"""The server accepts its own answers as history: in every API, whole and streamed, wherever the answer was cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.worker_process import WorkerProcess
from tests.helpers.serving import CHAT, HELLO, Running, exactly

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ARGUMENTS = '{"a": 1}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
MESSAGE = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
AND = {"role": "user", "content": "And?"}
# Answers by their ends: all of a text, and texts of which the rest is cut off by max_tokens.
WHOLE = ("Yes.", "<think>Hm.</think>", "<think>Hm.</think>Yes.", CALL, MESSAGE)
CUTS = (
    "",
    "<thi",
    "<think>\nH",
    "<think>\nHm.\n</think>\n\nI a",
    "I add.<tool",
    '<tool_call>\n{"name": "a',
    '<tool_call>\n{"name": "add", "arguments": ',
    '<tool_call>\n{"name": "add", "arguments": {',
    '<tool_call>\n{"name": "add", "arguments": {"a',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}',
    f'{CALL}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1',
)
SERVER = {"kind": "shows all", "served_model_names": ("tiny",), "responses_store": 200}


@dataclass(frozen=True)
class Ending:
    """An answer that the server is made to give: the beginning of a text, and why it ends there."""

    text: str
    reason: str  # "stop", "length" or "stop string"

    def __str__(self) -> str:
        return f"{self.reason} after {len(self.text)}"


ENDINGS = [
    *(Ending(text, "stop") for text in WHOLE),
    *(Ending(text, "length") for text in CUTS),
    Ending("Y", "stop string"),
    Ending("", "stop string"),
]
CASES = [(ending, stream) for ending in ENDINGS for stream in (False, True)]
SOME_CASES = [case for n, case in enumerate(CASES) if n % 4 in (0, 3)]  # each ending; tests/long has the others
# Responses have no stop strings.
RESPONSES, SOME_RESPONSES = ([case for case in some if case[0].reason != "stop string"] for some in (CASES, SOME_CASES))


@pytest.fixture
def shown(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The text of the last prompt."""
    prepare, seen = server.llm.prepare, list[Any]()

    async def noting(*arguments: Any, **options: Any) -> Any:
        seen.append(await prepare(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(server.llm, "prepare", noting)
    tokenizer = server.llm.engine.tokenizer
    return lambda: tokenizer.decode(seen[-1].token_ids, skip_special_tokens=False)


def asked(server: Running, ending: Ending) -> tuple[int, dict[str, Any]]:
    """max_tokens of a request that is answered so, and further keys."""
    starts = (MESSAGE, f"I add.{CALL}", f"{CALL}\n{CALL}", ending.text)
    text = next(text for text in starts if text.startswith(ending.text))
    if ending.reason != "length":
        text = ending.text + ("No" if ending.reason == "stop string" else "")
    count = len(server.llm.engine.tokenizer.encode(ending.text, add_special_tokens=False))
    return count if ending.reason == "length" else 400, {"structured_outputs": exactly(text)}


def forms(value: BaseModel) -> list[Any]:
    """An object of a client's in the forms that people send back."""
    kinds: list[dict[str, Any]] = [{}, {"exclude_none": True}, {"exclude_unset": True}]
    return [value, *(value.model_dump(warnings=False, **kind) for kind in kinds)]


def expected(ending: Ending) -> list[str]:
    """The parts of a whole answer that the next prompt holds, in this order."""
    parts = {"<think>": "<think>Hm.</think>", "Yes.": "Yes.", "I add.": "I add."}
    calls = [f'<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>'] * ending.text.count(CALL)
    return [part for mark, part in parts.items() if mark in ending.text] + calls


def check(ending: Ending, prompt: str) -> None:
    if ending.reason == "stop":
        assert "".join(expected(ending)) in prompt, prompt
    elif ARGUMENTS[:4] in ending.text:  # what was cut off is shown as it is
        cut = ending.text.rpartition('"arguments": ')[2]
        assert f'"arguments": {cut}}}</tool_call>' in prompt, prompt


@pytest.mark.parametrize(("ending", "stream"), SOME_CASES, ids=str)
def test_chats(server: Running, client: openai.OpenAI, shown: Callable[[], str], ending: Ending, stream: bool) -> None:
    max_tokens, extra = asked(server, ending)
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    body: Any = {"model": "tiny", "messages": HELLO, "tools": tools, "max_tokens": max_tokens, "extra_body": extra}
    if ending.reason == "stop string":
        body["stop"] = "N" if ending.text else "Y"
    if stream:
        with client.chat.completions.stream(**body) as events:
            events.until_done()  # its get_final_completion raises where an answer was cut off
            message: Any = events.current_completion_snapshot.choices[0].message
    else:
        message = client.chat.completions.create(**body).choices[0].message
    for form in forms(message):
        client.chat.completions.create(model="tiny", messages=[*HELLO, form, AND], max_tokens=1)  # type: ignore[list-item]
        check(ending, shown())


@pytest.mark.parametrize(("ending", "stream"), SOME_RESPONSES, ids=str)
def test_responses(
    server: Running, client: openai.OpenAI, shown: Callable[[], str], ending: Ending, stream: bool
) -> None:
    max_tokens, extra = asked(server, ending)
    tools: Any = [{"type": "function", "name": "add", "parameters": ADD}]
    body: Any = {"input": "Hello", "tools": tools, "max_output_tokens": max_tokens, "extra_body": extra}
    body["include"] = ["message.output_text.logprobs"]
    if stream:
        with client.responses.stream(model="tiny", **body) as events:
            *_, last = events
        response = last.response  # type: ignore[union-attr]
    else:
        response = client.responses.create(model="tiny", **body)
    assert response.status == ("incomplete" if ending.reason == "length" else "completed")
    follower: Any = {"model": "tiny", "max_output_tokens": 1}
    client.responses.create(input=[AND], previous_response_id=response.id, **follower)
    check(ending, shown())
    for items in zip(*map(forms, response.output), strict=True) if response.output else [()]:
        client.responses.create(input=[*HELLO, *items, AND], **follower)
        check(ending, shown())


@pytest.mark.parametrize(("ending", "stream"), SOME_CASES, ids=str)
def test_anthropics(
    server: Running, claude: anthropic.Anthropic, shown: Callable[[], str], ending: Ending, stream: bool
) -> None:
    max_tokens, extra = asked(server, ending)
    tools: Any = [{"name": "add", "input_schema": ADD}]
    body: Any = {"model": "tiny", "messages": HELLO, "tools": tools, "max_tokens": max_tokens, "extra_body": extra}
    body["thinking"] = {"type": "adaptive"}
    if ending.reason == "stop string":
        body["stop_sequences"] = ["N" if ending.text else "Y"]
    if stream:
        with claude.messages.stream(**body) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**body)
    for blocks in zip(*map(forms, message.content), strict=True) if message.content else [()]:
        answer: Any = {"role": "assistant", "content": list(blocks)}
        claude.messages.create(model="tiny", messages=[*HELLO, answer, AND], max_tokens=1)  # type: ignore[list-item]
        if ending.reason == "stop" or not stream:  # of a stream, the client itself makes an object of what was cut off
            check(ending, shown())


class Sum(BaseModel):
    a: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own object, sent as it is
def test_what_clients_have_parsed(client: openai.OpenAI, claude: anthropic.Anthropic, shown: Callable[[], str]) -> None:
    """Clients keep objects of their own in an answer, and send them back with it."""
    strict = {"name": "add", "parameters": ADD, "strict": True}
    wanted: Any = {"extra_body": {"structured_outputs": exactly(f"Yes.{CALL}")}, "model": "tiny"}
    text: Any = {"extra_body": {"chat_template_kwargs": {}}, "model": "tiny"}
    follower: Any = {"model": "tiny", "max_tokens": 1}
    for keys in (wanted | {"tools": [{"type": "function", "function": strict}]}, text | {"response_format": Sum}):
        message = client.chat.completions.parse(messages=HELLO, max_tokens=400, **keys).choices[0].message
        calls = message.tool_calls or ()
        assert message.parsed is not None or all(call.function.parsed_arguments == {"a": 1} for call in calls)
        for form in forms(message):
            client.chat.completions.create(messages=[*HELLO, form, AND], **follower)
            assert '{"a": 1}}</tool_call>; user' in shown() or message.parsed is not None
    follower = {"model": "tiny", "max_output_tokens": 1}
    for keys in (wanted | {"tools": [{"type": "function", **strict}]}, text | {"text_format": Sum}):
        response = client.responses.parse(input="Hello", max_output_tokens=400, **keys)
        for items in zip(*map(forms, response.output), strict=True):
            client.responses.create(input=[*HELLO, *items, AND], **follower)
    parsed = claude.messages.parse(model="tiny", messages=HELLO, max_tokens=400, output_format=Sum)  # type: ignore[arg-type]
    for blocks in zip(*map(forms, parsed.content), strict=True):
        answer: Any = {"role": "assistant", "content": list(blocks)}
        claude.messages.create(model="tiny", messages=[*HELLO, answer, AND], max_tokens=1)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (None, "{}"),
        ("", "{}"),
        ("null", "null"),
        ('"x"', '"x"'),
        ("[1]", "[1]"),
        ("{", "{"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a":1}', '{"a": 1}'),
        ("9" * 5000, "9" * 5000),
        ('{"a":' * 2000, '{"a":' * 2000),
    ],
    ids=range(11),
)
def test_arguments_of_any_form(server: Running, shown: Callable[[], str], arguments: str | None, seen: str) -> None:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "x", "type": "function", "function": function}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, AND]
    item = {"type": "function_call", "call_id": "x", **function}
    bodies: dict[str, Any] = {CHAT: {"messages": messages, "max_tokens": 1}}
    bodies["/v1/responses"] = {"input": [*HELLO, item, AND], "max_output_tokens": 1}
    for path, body in bodies.items():
        answer = server.post(path, body)
        assert answer.status == 200 or "maximum context length" in answer.error["message"], answer.body
        assert answer.status != 200 or f'"arguments": {seen}}}</tool_call>' in shown()


CUT, WITH_CALLS = '{"city": "Gr', "{% for message in messages %}{% set calls = message.tool_calls or [] %}"
KEYS = (
    "{% for call in calls %}{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
)
# Kinds of templates, and what they print of a call that was whole, and of one that was cut off.
KINDS = {
    "goes through keys": (KEYS, "city=Graz;", f"INVALID_JSON={CUT};"),
    "refuses texts": (
        "{% for call in calls %}{% if call.function.arguments is not mapping %}{{ raise_exception('no mapping') }}"
        f"{{% endif %}}{{% endfor %}}{KEYS}",
        "city=Graz;",
        f"INVALID_JSON={CUT};",
    ),
    "prints characters of texts": (
        "{% for call in calls %}{% for key in call.function.arguments %}{{ key }}="
        "{{ '%s' | format(call.function.arguments[key]) }};{% endfor %}",
        "city=Graz;",
        f"INVALID_JSON={CUT};",
    ),
    "puts texts together": (
        "{% for call in calls %}{{ call.function.name + ' ' + call.function.arguments }}",
        'weather {"city": "Graz"}',
        f"weather {CUT}",
    ),
    "prints JSON": (
        "{% for call in calls %}{{ call.function | tojson }}",
        '{"name": "weather", "arguments": {"city": "Graz"}}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Gr"}',
    ),
    "shows no calls": ("{% for call in calls %}", "", ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_templates_print_calls_in_the_form_that_they_can(kind: str) -> None:
    source, whole, cut = KINDS[kind]
    template = ChatTemplate(f"{WITH_CALLS}{source}{{% endfor %}}{{% endfor %}}")
    for arguments, printed in (({"city": "Graz"}, whole), ('{"city": "Graz"}', None), (CUT, cut)):
        call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        text = template.render([*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}], {})
        assert printed is None or text == printed


def test_templates_that_refuse_empty_answers() -> None:
    """Empty answers are then rendered in another form, but no conversation that is refused for another reason."""
    template = ChatTemplate(
        "{% for message in messages %}{% if not message.content %}{{ raise_exception('empty') }}{% endif %}"
        "{{ message.content }};{% endfor %}"
    )
    assert template.render([*HELLO, {"role": "assistant", "content": ""}], {}) == "Hello; ;"
    with pytest.raises(UsageError, match="empty"):
        template.render([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}], {})


def test_a_template_that_takes_too_much_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ 'x'.center(3000000000) }}")
    ask, asked = WorkerProcess.ask, list[bytes]()
    monkeypatch.setattr(WorkerProcess, "ask", lambda worker, data: asked.append(data) or ask(worker, data))
    with pytest.raises(EngineError, match="the chat template does not end"):
        template.render([{"role": "assistant", "content": "", "tool_calls": []}], {})
    assert len(asked) == 1
