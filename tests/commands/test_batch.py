"""Files of prompts: answers in the same order, or an error that names the line and nothing written."""

import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands import batch
from enginewright.runtime.commands.batch import read_requests, run_batch
from enginewright.runtime.commands.batch_answers import AnswerWriter
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.outputs import NULL, make_device, read_end, start_engine
from tests.helpers.serving import tiny_engine
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    config, path = tiny_config("llama"), tmp_path_factory.mktemp("batch") / "tiny.engine"
    build_engine(MemoryCheckpoint.of(tiny_model(config), config), BuildConfig(), path)
    with LLM(path, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16, threads=1) as opened:
        yield opened


def answers(llm: LLM, folder: Path, lines: list[Any], *, resume: bool = False, **common: Any) -> list[dict[str, Any]]:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    source.write_text("\n".join(texts) + "\n")
    run_batch(llm, source, output, common, resume=resume)
    return [json.loads(line) for line in output.read_bytes().splitlines()]


def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers without what differs from run to run."""
    varying = {"queue_s", "first_token_s", "total_s", "num_cached_tokens"}
    kept = [{name: value for name, value in answer.items() if name not in varying} for answer in found]
    for answer in kept:
        if "response" in answer:
            body = answer["response"]["body"]
            answer["response"] = {"choices": body.get("choices"), "error": body.get("error")}
    return kept


def openai_line(name: str, body: dict[str, Any], url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_answers_are_in_the_order_of_the_lines(llm: LLM, tmp_path: Path) -> None:
    """Long and short ones end in another order than they came; each is what it would be alone."""
    lengths = [30, 1, 12, 3, 25, 2]
    lines = [{"prompt": f"Text {n} \u2028 é", "max_tokens": n, "ignore_eos": True, "id": f"#{n}"} for n in lengths]
    found = answers(llm, tmp_path, lines)
    assert [answer["id"] for answer in found] == [f"#{n}" for n in lengths]
    assert [len(answer["token_ids"]) for answer in found] == lengths
    for n, answer in zip(lengths, found, strict=True):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        (alone,) = llm.generate(f"Text {n} \u2028 é", params)
        assert (answer["token_ids"], answer["text"]) == (alone.outputs[0].token_ids, alone.outputs[0].text)
        assert answer["finish_reason"] == "length" and answer["num_prompt_tokens"] == len(alone.prompt_token_ids)


def test_options_of_a_line_win_over_those_of_the_command(llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "a", "max_tokens": None},
        "",
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": 2},
        {"prompt": "a", "logit_bias": {"2": 100}, "ignore_eos": False, "stop_token_ids": [2]},
        {"prompt": "a", "stop": "x", "logit_bias": {"90": 1.5}, "id": {"any": ["JSON"]}},
        {"prompt": "a", "stop": ["x", "y"]},
        {"prompt": "a", "allowed_token_ids": [70, 71]},
    ]
    found = answers(llm, tmp_path, lines, max_tokens=4, ignore_eos=True)
    assert [len(answer["token_ids"]) for answer in found[:4]] == [4, 2, 4, 4]
    assert "logprobs" not in found[0] and len(found[3]["logprobs"][0]["top"]) == 2
    assert (found[4]["token_ids"], found[4]["finish_reason"]) == ([2], "stop")
    assert set(found[7]["token_ids"]) <= {70, 71}
    assert found[5]["id"] == {"any": ["JSON"]} and "id" not in found[0]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", "line 3"),
        ("[1]", "object"),
        ('{"prompt": "a"', "line 3"),
        ('{"prompt": "\\ud800"}', "line 3"),
        ("[" * 100_000, "line 3"),
        ("{}", '"prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, '"prompt" or "messages"'),
        ({"prompt": 5}, "str"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "str"),
        ({"messages": "a"}, "array"),
        ({"messages": [{"role": "user", "content": 5}]}, "str"),
        ({"messages": []}, "empty"),
        ({"prompt": "a", "temprature": 1, "zzz": 2}, "temprature, zzz"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "stop": 5}, "array"),
        ({"prompt": "a", "stop": [5]}, "str"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, "array"),
        ({"prompt": "a", "stop_token_ids": [307]}, "307"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "int"),
        ({"prompt": "a", "logit_bias": {"400": 1}}, "400"),
        ({"prompt": "a", "n": 0}, "n must be"),
        ({"prompt": "word " * 300}, "context length is 100"),
        (openai_line("x", {"input": "a"}, "/v1/embeddings"), "/v1/chat/completions and /v1/completions"),
        (openai_line("x", {"prompt": "a"}) | {"method": "GET"}, "POST"),
        (openai_line("x", {"prompt": "a"}) | {"prompt": "a"}, "prompt"),
        ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "body"),
        ({"body": {"prompt": "a"}, "method": "POST", "url": "/v1/completions"}, "custom_id"),
    ],
)
def test_an_error_names_its_line_and_nothing_is_written(llm: LLM, tmp_path: Path, line: Any, names: str) -> None:
    (tmp_path / "out.jsonl").write_text("from before")
    with pytest.raises(UsageError, match=r"in\.jsonl, line 3") as refused:
        answers(llm, tmp_path, [{"prompt": "fine"}, "", line, {"prompt": "fine"}])
    assert names in str(refused.value) and refused.value.exit_code == 2
    assert (tmp_path / "out.jsonl").read_text() == "from before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_several_answers_to_one_line(llm: LLM, tmp_path: Path) -> None:
    lines = [{"prompt": "a", "n": 3, "seed": 1, "temperature": 1, "id": "x"}, {"prompt": "b"}]
    found = answers(llm, tmp_path, lines, max_tokens=5, ignore_eos=True)
    assert [(answer.get("id"), answer.get("index")) for answer in found] == [("x", 0), ("x", 1), ("x", 2), (None, None)]
    assert len({tuple(answer["token_ids"]) for answer in found}) == 4


def test_an_answer_repeats_its_prompt(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = answers(llm, tmp_path, [{"prompt": "Größe", "id": 0}, {"messages": messages}], max_tokens=1)
    assert (found[0]["id"], found[0]["prompt"]) == (0, "Größe") and "messages" not in found[0]
    assert found[1]["messages"] == messages and not {"id", "prompt"} & found[1].keys()


def test_openais_batch_form(llm: LLM, tmp_path: Path) -> None:
    """Results hold the API's own bodies, in the order of the lines, also among lines of our form."""
    conversation = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chat = {"model": "gpt", "messages": conversation, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    several = {"prompt": ["a", "b c"], "n": 2, "max_tokens": 2, "temperature": 0}
    lines = [
        openai_line("first", chat | {"temperature": 0}, "/v1/chat/completions"),
        {"prompt": "a", "max_tokens": 2},
        openai_line("second", several),
    ]
    first, ours, second = answers(llm, tmp_path, lines, ignore_eos=True)
    assert [ours["prompt"], first["custom_id"], second["custom_id"]] == ["a", "first", "second"]
    assert first.keys() == second.keys() == {"id", "custom_id", "response", "error"}
    assert first["error"] is None and first["response"]["status_code"] == 200 and first["id"] != second["id"]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    (expected,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    body, output = first["response"]["body"], expected.outputs[0]
    (choice,) = body["choices"]
    assert (body["object"], body["model"]) == ("chat.completion", llm.engine.manifest.name)
    assert choice["message"] == {"role": "assistant", "content": output.text} and choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == 3 == len(choice["logprobs"]["content"])
    assert output.logprobs is not None
    for token, entry, named in zip(output.token_ids, choice["logprobs"]["content"], output.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(named[token].logprob)
        likeliest = sorted((one.logprob for one in named.values() if one.rank is not None), reverse=True)
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx(likeliest)
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    texts = [llm.generate(prompt, greedy)[0].outputs[0].text for prompt in ("a", "a", "b c", "b c")]
    body = second["response"]["body"]
    assert [(one["index"], one["text"]) for one in body["choices"]] == list(enumerate(texts))
    assert body["object"] == "text_completion" and body["usage"]["completion_tokens"] == 8


def test_how_long_answers_of_openais_form_are(llm: LLM, tmp_path: Path) -> None:
    """The API's default applies, and the command's --max-tokens replaces it where a body has no max_tokens."""
    lines = [openai_line("x", {"prompt": "a"}), openai_line("y", {"prompt": "a", "max_tokens": 3})]
    for common, expected in (({}, [16, 3]), ({"max_tokens": 5}, [5, 3])):
        found = answers(llm, tmp_path, lines, ignore_eos=True, **common)
        assert [one["response"]["body"]["usage"]["completion_tokens"] for one in found] == expected


@pytest.mark.parametrize(
    ("body", "url", "param"),
    [
        ({"prompt": "a", "tempreture": 1}, "/v1/completions", "tempreture"),
        ({"prompt": "a", "temperature": -1}, "/v1/completions", "temperature"),
        ({"prompt": "a", "stream": True}, "/v1/completions", "stream"),
        ({"prompt": "word " * 300}, "/v1/completions", "prompt"),
        ({"messages": []}, "/v1/chat/completions", "messages"),
        ({}, "/v1/chat/completions", "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "/v1/chat/completions", "messages[0].role"),
    ],
)
def test_a_body_that_is_refused_is_answered_so(
    llm: LLM, tmp_path: Path, body: dict[str, Any], url: str, param: str, capfd: pytest.CaptureFixture[str]
) -> None:
    refused, answered = answers(llm, tmp_path, [openai_line("x", body, url), openai_line("y", {"prompt": "a"})])
    assert (refused["custom_id"], refused["response"]["status_code"], refused["error"]) == ("x", 400, None)
    assert refused["response"]["body"]["error"]["param"] == param
    assert answered["response"]["status_code"] == 200
    assert "[1 of 2 requests failed; their lines say why]" in capfd.readouterr().err


def test_a_batch_of_which_nothing_is_answered_has_failed(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no request was answered") as failed:
        answers(llm, tmp_path, [openai_line("x", {"prompt": "a", "n": 0})])
    assert failed.value.exit_code == 1
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 400


def test_no_request_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    with pytest.raises(UsageError, match="has no request"):
        read_requests(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_requests(tmp_path / "nowhere.jsonl")


def test_a_line_beyond_the_limit_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_LINE_BYTES", 100)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 200}))
    with pytest.raises(UsageError, match="line 1: longer than 100 bytes"):
        read_requests(tmp_path / "long.jsonl")


def test_a_full_disk_keeps_the_answers_before_it(llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel itself refuses to write, within a line: that line is cut off, and --resume goes on after it."""
    lines = [{"prompt": "a", "max_tokens": 1, "id": f"{n}" * 100_000} for n in range(4)]
    expected = answers(llm, tmp_path, lines)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
    try:
        with pytest.raises(EngineError, match=r"out\.jsonl cannot be written: File too large"):
            run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "[2 of 4 answers are in" in (said := capfd.readouterr().err) and "--resume computes" in said
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert without_times(kept) == without_times(expected[:2])
    assert without_times(answers(llm, tmp_path, lines, resume=True)) == without_times(expected)


def test_resume_asks_only_for_what_is_missing(llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A half line at the end is cut off, and so is a request that has only some of its answers."""
    lines = [
        openai_line("x", {"prompt": "a"}),
        openai_line("refused", {"prompt": "a", "n": 0}),
        {"prompt": "b", "id": {"row": 1}},
        {"prompt": "c", "id": "x", "n": 3, "seed": 1, "temperature": 1},
    ]
    expected = without_times(answers(llm, tmp_path, lines, max_tokens=3, ignore_eos=True))
    whole = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    for left, num_asked in ((whole, 0), (whole[:5], 1), ([*whole[:3], whole[3][:-9]], 1), (whole[:1], 2), ([], 3)):
        (tmp_path / "out.jsonl").write_bytes(b"".join(left))
        capfd.readouterr()
        found = answers(llm, tmp_path, lines, resume=True, max_tokens=3, ignore_eos=True)
        assert without_times(found) == expected
        assert f"[{num_asked} of {num_asked} answers" in capfd.readouterr().err
    (tmp_path / "out.jsonl").unlink()
    assert without_times(answers(llm, tmp_path, lines, resume=True, max_tokens=3, ignore_eos=True)) == expected


@pytest.mark.parametrize(
    ("lines", "left", "message"),
    [
        ([{"prompt": "a", "id": 1}, {"prompt": "b"}], "", r"in\.jsonl, line 2: it has no id"),
        ([{"prompt": "a", "id": 1}], '{"id": 1}\n{"id": 2}\n', r"out\.jsonl, line 2: it answers no request"),
        ([{"prompt": "a", "id": 1}], "a letter\n", r"out\.jsonl, line 1: it is no answer"),
    ],
)
def test_what_cannot_be_resumed_is_refused(llm: LLM, tmp_path: Path, lines: list[Any], left: str, message: str) -> None:
    (tmp_path / "out.jsonl").write_text(left)
    with pytest.raises(UsageError, match=message):
        answers(llm, tmp_path, lines, resume=True)
    assert (tmp_path / "out.jsonl").read_text() == left


@pytest.mark.parametrize("kind", ["fifo", "device", "descriptor"])
def test_answers_go_into_what_is_no_regular_file(llm: LLM, tmp_path: Path, kind: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 3, "ignore_eos": true}\n' * 2)
    output = tmp_path / "out"
    if kind == "device":
        make_device(output, NULL)
        run_batch(llm, tmp_path / "in.jsonl", output, {})
        assert stat.S_ISCHR(output.lstat().st_mode)
    else:
        with read_end(output, kind) as (path, read):
            run_batch(llm, tmp_path / "in.jsonl", path, {})
        assert [len(json.loads(line)["token_ids"]) for line in read().splitlines()] == [3, 3]
    assert {entry.name for entry in tmp_path.iterdir()} <= {"in.jsonl", "out"}


def test_an_earlier_output_keeps_its_mode_and_a_link_stays_one(llm: LLM, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "out.jsonl").symlink_to("target")
    for mode, before in ((0o600, "old"), (0o640, "x" * 100_000)):
        target.write_text(before)
        target.chmod(mode)
        assert len(answers(llm, tmp_path, [{"prompt": "a", "max_tokens": 1}])) == 1
        assert (tmp_path / "out.jsonl").is_symlink() and stat.S_IMODE(target.stat().st_mode) == mode
    target.unlink()
    assert len(answers(llm, tmp_path, [{"prompt": "a", "max_tokens": 1}])) == 1
    assert (tmp_path / "out.jsonl").is_symlink() and target.is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_the_answers_that_are_there(llm: LLM, tmp_path: Path, number: signal.Signals) -> None:
    """The first is read while the second is computed, which takes long; the third waited for the second."""
    lengths = [(40, "first"), (4000, "long"), (1, "third")]
    lines = [{"prompt": "a", "max_tokens": n, "ignore_eos": True, "id": name} for n, name in lengths]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.mkfifo(tmp_path / "out")
    options = ["--input", tmp_path / "in.jsonl", "-o", tmp_path / "out"]
    process = start_engine("generate", tiny_engine(), *options)
    with (tmp_path / "out").open() as output:
        found = [json.loads(output.readline())]
        process.send_signal(number)
        found += map(json.loads, output)
    _, errors = process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
    assert [answer["id"] for answer in found] == ["first", "third"]
    assert f"[2 of 3 answers are in {tmp_path / 'out'}]" in errors


def written_until(path: Path, opcode: int) -> tuple[list[int], bool]:
    """Adds three answers to a writer, and raises KeyboardInterrupt before an instruction, as a signal's handler may.

    Args:
        path: the output.
        opcode: number of instructions of the writer before that.

    Returns:
        The indices that were added before, and true if all instructions were run.
    """
    left, added = iter(range(opcode, -1, -1)), list[int]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name not in ("add", "_write", "write_all"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    try:
        with AnswerWriter(path, 3) as writer:
            for index in (0, 2, 1):
                sys.settrace(trace)
                writer.add(index, f"{index}\n".encode())
                sys.settrace(None)
                added.append(index)
    except KeyboardInterrupt:
        return added, False
    finally:
        sys.settrace(None)
    return added, True


@pytest.mark.parametrize("regular", [True, False], ids=["file", "pipe"])
def test_no_answer_is_lost_or_twice_wherever_a_signal_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], regular: bool
) -> None:
    for opcode in range(2000):
        reader, end = os.pipe()
        path = tmp_path / str(opcode) if regular else Path(f"/dev/fd/{end}")
        added, complete = written_until(path, opcode)
        os.close(end)
        with os.fdopen(reader, "rb") as stream:
            text = path.read_bytes() if regular else stream.read()
        found = [int(line) for line in text.splitlines()]
        assert text == b"".join(b"%d\n" % index for index in found)
        assert found == sorted(set(found)) and set(added) <= set(found)
        if complete:
            break
        noted = capsys.readouterr().err
        assert len(found) == 3 or f"[{len(found)} of 3 answers" in noted
    assert complete and opcode > 50


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b'{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": 1}\n', 'lines 1 and 3: both have the "id"'),
        (
            b'{"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n' * 2,
            'lines 1 and 2: both have the "custom_id"',
        ),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: byte 13 of the line is not UTF-8"),
        (
            b'{"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": {"prompt": "\xe9"}}\n',
            "line 1: byte",
        ),
    ],
)
def test_lines_that_are_refused_before_the_work(llm: LLM, tmp_path: Path, lines: bytes, message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines)
    with pytest.raises(UsageError, match=message):
        run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", {})
    assert not (tmp_path / "out.jsonl").exists()


def test_a_byte_order_mark_is_no_part_of_the_first_line(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}\r\n{"prompt": "b", "max_tokens": 1}\r\n'
    )
    run_batch(llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl", {})
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [answer["prompt"] for answer in found] == ["a", "b"]


@pytest.mark.parametrize("redirection", ["| head -1", ">&-"])
def test_a_stdout_that_nobody_reads_ends_the_command_quietly(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "max_tokens": 400}\n')
    command = shlex.join([sys.executable, "-m", "enginewright.cli", "generate", str(tiny_engine())])
    script = f"set -o pipefail; {command} --input {shlex.quote(str(tmp_path / 'in.jsonl'))} {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout.count("\n") == redirection.startswith("|")
    assert re.fullmatch(r"\[\d of 2 answers, \d+ tokens\]\n", done.stderr)


def test_without_a_file_answers_go_to_stdout(
    llm: LLM, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 3, "ignore_eos": true}\n' * 2)
    run_batch(llm, tmp_path / "in.jsonl", None, {})
    printed = capfdbinary.readouterr()
    assert [len(json.loads(line)["token_ids"]) for line in printed.out.splitlines()] == [3, 3]
    assert b"2 of 2 answers, 6 tokens" in printed.err


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    llm: LLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "The"}\n')
    (tmp_path / "link").symlink_to("in.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    engine = llm.engine.file.path
    for output, piece in [
        (tmp_path / "nowhere" / "out.jsonl", "there is no folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / "loop", "symbolic links"),
        (source, "it is read by this command"),
        (tmp_path / "link", "it is read by this command"),
        (engine, "it is read by this command"),
        (Path("/dev/fd/77"), "Bad file descriptor"),
    ]:
        with pytest.raises(UsageError, match=piece):
            run_batch(llm, source, output, {})
    os.mkfifo(tmp_path / "fifo")
    for output in (None, tmp_path / "fifo"):
        with pytest.raises(UsageError, match="--resume needs a file"):
            run_batch(llm, source, output, {}, resume=True)
    assert source.read_text() == '{"prompt": "The"}\n' and "answers" not in capfd.readouterr().err
