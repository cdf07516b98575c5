"""Other people's clients, unmodified, against `engine run` of a real model.

`make test-long` installs them (clients.txt, agents.txt) and builds the engine.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.serving import running

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
CLIENTS, AGENTS = ROOT / ".cache/clients/bin", ROOT / ".cache/agents/bin"
MODEL, KEY = "SmolLM2-135M-Instruct", "key"
# Nothing is fetched from anywhere; what clients keep goes to a folder of the test.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Lyon", "Berlin"], "answer": 0},
    {"question": "The capital of Italy is", "choices": ["Madrid", "Rome", "Milan"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["wet", "tall", "cold"], "answer": 2},
    {"question": "Two plus two is", "choices": ["four", "seven", "nine"], "answer": 0},
    {"question": "Romeo and Juliet is by", "choices": ["Jane Austen", "William Shakespeare"], "answer": 1},
    {"question": "The chemical symbol of tin is", "choices": ["Ti", "Sn", "Tn"], "answer": 1},
    {"question": "The tallest of all animals is the", "choices": ["elephant", "blue whale", "giraffe"], "answer": 2},
]
TASK = """
task: small_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """
output_type: generate_until
doc_to_target: " {{choices[answer]}}"
generation_kwargs: {until: ["\\n", ".", ","], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""

CITY: dict[str, Any] = {"city": {"enum": ["Paris", "Rome"]}}
TOOL = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
HISTORY: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert ENGINE.is_file() and CLIENTS.is_dir(), "run `make test-long`, which makes both"
    command = [sys.executable, "-m", "enginewright.cli", "run", str(ENGINE), "--port", "0", "--api-key", KEY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1", server.stderr.readline())
        assert found
        yield found[1]
        server.terminate()
        log = server.stderr.read()  # a request is a line of it
        assert server.wait(30) == 0 and "status=5" not in log


@pytest.fixture(scope="module")
def tools_address() -> Iterator[str]:
    """Address of a server with a tiny model that calls tools, which SmolLM2 does not."""
    with running(kind="calls tools", api_keys=(KEY,)) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers reads the engine's tokenizer from."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with Engine.open(ENGINE) as engine:
        config = json.loads(engine.file.read_section("tokenizer_config.json"))
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer.json").write_bytes(engine.file.read_section("tokenizer.json"))
        (folder / "chat_template.jinja").write_bytes(engine.file.read_section("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def client(folder: Path, *command: str, programs: Path = CLIENTS) -> str:
    """Output of a client, which has to end well.

    Args:
        programs: the folder of its environment's programs.
    """
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf"), "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [str(programs / command[0]), *command[1:]], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_litellm(address: str, tmp_path: Path) -> None:
    """Two turns, of which the second has litellm's own reply in its history; a stream; its classes of errors."""
    printed = client(tmp_path, "python", str(ROOT / "tests/long/litellm_turns.py"), address, MODEL)
    first, second, stream, too_long, wrong_key = (
        json.loads(line) for line in printed.splitlines() if line.startswith("{")
    )
    assert "Paris" in first["text"] and "Rome" in second["text"]
    assert stream == {"text": first["text"], "usage": True}
    assert (too_long["error"], wrong_key["error"]) == ("ContextWindowExceededError", "AuthenticationError")


@pytest.mark.parametrize("kind", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(address: str, tokenizer: Path, tmp_path: Path, kind: str) -> None:
    """GuideLLM wants the usage in each event of a stream."""
    options = [
        f"--backend=kind=openai_http,target={address},model={MODEL},api_key={KEY},request_format={kind}",
        "--profile=kind=synchronous",
        "--constraint=kind=max_requests,count=4",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--tokenizer=kind=hf_auto,model={tokenizer}",
        f"--output=kind=json,path={tmp_path}/report.json",
    ]
    client(tmp_path, "guidellm", "run", *options, "--disable-progress")
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4 and not requests["errored"]
    assert [request["output_metrics"]["text_tokens"] for request in requests["successful"]] == [8] * 4


def test_lm_eval(address: str, tokenizer: Path, smollm2_folder: Path, tmp_path: Path) -> None:
    """A task of multiple choice, which takes log-probabilities of prompts: they are transformers', and so is the score.
    And one of generated answers, by completions and by chats.
    """
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, rest in (("choices", CHOICES), ("answers", ANSWERS)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)

    def evaluate(route: str, task: str, *options: str) -> tuple[dict[str, float], list[Any]]:
        """Scores of a task, and what came for each question."""
        model, output = f"local-{route.replace('/', '-')}", tmp_path / route / task
        arguments = f"base_url={address}/v1/{route},model={MODEL},tokenizer={tokenizer},num_concurrent=4,max_retries=1"
        folders = ("--include_path", str(tmp_path), "--output_path", str(output), "--log_samples")
        client(tmp_path, "lm_eval", "--model", model, "--model_args", arguments, "--tasks", task, *folders, *options)
        (report,), (samples,) = output.rglob("results*.json"), output.rglob("samples*.jsonl")
        answers = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
        return json.loads(report.read_text())["results"][task], answers

    scores, answers = evaluate("completions", "small_choices")
    expected = choice_logprobs(smollm2_folder)
    for found, choices in zip(answers, expected, strict=True):
        assert [float(logprob) for logprob, _ in found] == pytest.approx(choices, abs=tolerances.LM_EVAL_NATS)
    right = [choices.index(max(choices)) == one["answer"] for choices, one in zip(expected, QUESTIONS, strict=True)]
    assert scores["acc,none"] == right.count(True) / len(right) and set(right) == {True, False}
    scores, answers = evaluate("completions", "small_answers")
    right = [text == f" {one['choices'][one['answer']]}" for (text,), one in zip(answers, QUESTIONS, strict=True)]
    # No question is a close one: right answers lead by 0.9 nats or more, and where the answer is wrong, the right one's
    # first token trails by as much.
    assert right == [True, True, True, False, False, True, False]
    assert scores["exact_match,none"] == right.count(True) / len(right)
    _, answers = evaluate("chat/completions", "small_answers", "--apply_chat_template")
    assert "cold" in answers[2][0]


def choice_logprobs(folder: Path) -> list[list[float]]:
    """Log-probabilities of each question's choices, by transformers."""
    model, encode = AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), AutoTokenizer.from_pretrained(folder)

    def logprob(question: str, choice: str) -> float:
        start, ids = len(encode(question)["input_ids"]), torch.tensor(encode(f"{question} {choice}")["input_ids"])
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        return float(logprobs[start - 1 : -1].gather(1, ids[start:, None]).sum())

    return [[logprob(one["question"], choice) for choice in one["choices"]] for one in QUESTIONS]


def test_langchain(address: str, tools_address: str, tmp_path: Path) -> None:
    printed = client(tmp_path, "python", str(ROOT / "tests/long/langchain_turns.py"), address, MODEL, tools_address)
    answer, stream, batch, call, city, response = (json.loads(line) for line in printed.splitlines())
    assert "Paris" in answer["text"] and answer["usage"]
    assert stream == answer and batch["texts"] == [answer["text"]] * 3
    assert call["call"] == "population" and call["city"] in ("Paris", "Rome") and call["replied"]
    assert city["city"] in ("Paris", "Rome") and response["text"] == answer["text"]


def test_instructor(address: str, tools_address: str, tmp_path: Path) -> None:
    """Instructor's default mode, TOOLS, works also for a model whose template knows no tools."""
    printed = client(tmp_path, "python", str(ROOT / "tests/long/instructor_turns.py"), address, MODEL, tools_address)
    smollm2, tiny = (json.loads(line) for line in printed.splitlines())
    assert smollm2 == {"city": "Paris", "streamed": "Paris"}
    assert tiny["city"] in ("Paris", "Rome")
    assert tiny["streamed"] in ("Paris", "Rome", None)  # a class in parts requires no field


@pytest.mark.parametrize("name", ["openai_agents", "pydantic_ai"])
def test_agents_call_their_tools_and_then_answer_in_their_format(name: str, tmp_path: Path) -> None:
    """Over Chat Completions and Responses, whole and streamed: the same calls and the same answers."""
    with running(kind="calls tools in turns", served_model_names=("tiny",)) as server:
        script, address = ROOT / f"tests/long/{name}_turns.py", f"http://127.0.0.1:{server.port}"
        printed = client(tmp_path, "python", str(script), address, programs=AGENTS)
    rows = [json.loads(line) for line in printed.splitlines()]
    settings = {row["setting"]: row["runs"] for row in rows}
    assert len(rows) == 4 * len(settings) == 8
    assert all(row["runs"] == settings[row["setting"]] for row in rows)
    for setting, runs in settings.items():
        has_called = {bool(run["calls"]) for run in runs}
        assert has_called == ({True} if setting == "required" else {True, False}), (setting, runs)
        assert all(run["results"] == [f"rain in {city}" for city in run["calls"]] for run in runs), runs


def test_openai(address: str, tools_address: str) -> None:
    """The official client: async as sync, streams as whole answers, a tool's call, an answer of a class, Responses."""
    options: dict[str, Any] = {"model": MODEL, "messages": HISTORY, "temperature": 0, "max_tokens": 60}
    tools = [{"type": "function", "function": {"name": "population", "parameters": TOOL}}]
    with_tool = options | {"model": "tiny", "max_tokens": 300, "tools": tools, "tool_choice": "required"}

    async def in_parallel() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as opened:

            async def streamed() -> str:
                pieces = [chunk async for chunk in await opened.chat.completions.create(stream=True, **options)]
                return "".join(piece.choices[0].delta.content or "" for piece in pieces)

            whole = await opened.chat.completions.create(**options)
            return [whole.choices[0].message.content, *await asyncio.gather(*(streamed() for _ in range(3)))]

    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as opened:
        text = opened.chat.completions.create(**options).choices[0].message.content
        assert text is not None and "Paris" in text and asyncio.run(in_parallel()) == [text] * 4
        parsed = opened.chat.completions.parse(response_format=City, **options).choices[0].message.parsed
        assert parsed is not None and parsed.name in ("Paris", "Rome")
        asked: dict[str, Any] = {"model": MODEL, "input": HISTORY, "temperature": 0, "max_output_tokens": 60}
        response = opened.responses.create(**asked)
        with opened.responses.stream(**asked) as stream:
            assert stream.get_final_response().output_text == response.output_text == text
        assert opened.responses.parse(text_format=City, **asked).output_parsed == parsed
        follows = opened.responses.create(**asked | {"input": "And of Italy?"}, previous_response_id=response.id)
        assert "Rome" in follows.output_text
    with openai.OpenAI(base_url=f"{tools_address}/v1", api_key=KEY, max_retries=0) as opened:
        (call,) = opened.chat.completions.create(**with_tool).choices[0].message.tool_calls
        with opened.chat.completions.stream(**with_tool) as events:
            (again,) = events.get_final_completion().choices[0].message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == (again.function.name, again.function.arguments)
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_anthropic(address: str, tools_address: str) -> None:
    """The official client: async as sync, streams as whole answers, a tool's call."""
    options: dict[str, Any] = {"model": MODEL, "messages": HISTORY, "temperature": 0, "max_tokens": 60}
    options["extra_body"] = {"temperature": options.pop("temperature")}
    with_tool = options | {
        "model": "tiny",
        "max_tokens": 300,
        "tools": [{"name": "population", "input_schema": TOOL}],
        "tool_choice": {"type": "any"},
    }

    async def later() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=address, api_key=KEY, max_retries=0) as opened,
            opened.messages.stream(**options) as stream,
        ):
            return await stream.get_final_text()

    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as opened:
        (block,) = opened.messages.create(**options).content
        with opened.messages.stream(**options) as stream:
            assert "Paris" in block.text and stream.get_final_text() == block.text == asyncio.run(later())
        assert opened.messages.count_tokens(model=MODEL, messages=HISTORY).input_tokens > 5
    with anthropic.Anthropic(base_url=tools_address, api_key=KEY, max_retries=0) as opened:
        (call,) = opened.messages.create(**with_tool).content
        with opened.messages.stream(**with_tool) as stream:
            (again,) = stream.get_final_message().content
        assert call.name == again.name == "population" and call.input == again.input
        assert call.input["city"] in ("Paris", "Rome")
