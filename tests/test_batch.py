"""Files of prompts: answers in the same order, or an error that names the line and nothing written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import EngineError, UsageError
from enginewright.runtime import batch
from enginewright.runtime.batch import read_requests, run_batch
from enginewright.runtime.llm import LLM
from enginewright.runtime.sampling import SamplingParams
from tests.tiny import MemoryCheckpoint, tiny_config, tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    config, path = tiny_config("llama"), tmp_path_factory.mktemp("batch") / "tiny.engine"
    build_engine(MemoryCheckpoint.of(tiny_model(config), config), BuildConfig(), path)
    with LLM(path, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16, threads=1) as opened:
        yield opened


def answers(llm: LLM, folder: Path, lines: list[Any], **common: Any) -> list[dict[str, Any]]:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    source.write_text("\n".join(texts) + "\n")
    run_batch(llm, source, output, common)
    return [json.loads(line) for line in output.read_text().splitlines()]


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
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "stop": 5}, "array"),
        ({"prompt": "a", "stop": [5]}, "str"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, "array"),
        ({"prompt": "a", "stop_token_ids": [307]}, "307"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "int"),
        ({"prompt": "a", "logit_bias": {"400": 1}}, "400"),
        ({"prompt": "a", "n": 0}, "n must be"),
        ({"prompt": "word " * 300}, "limit of 100"),
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


def test_a_failing_disk_leaves_nothing(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for method in ("write_bytes", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, full)
            with pytest.raises(EngineError, match=r"out\.jsonl cannot be written: No space left"):
                answers(llm, tmp_path, [{"prompt": "a", "max_tokens": 1}])
        assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_without_a_file_answers_go_to_stdout(
    llm: LLM, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 3, "ignore_eos": true}\n' * 2)
    run_batch(llm, tmp_path / "in.jsonl", None, {})
    printed = capfdbinary.readouterr()
    assert [len(json.loads(line)["token_ids"]) for line in printed.out.splitlines()] == [3, 3]
    assert b"2 of 2 answers, 6 tokens" in printed.err


def test_a_missing_output_folder_is_said_before_the_work(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "The"}\n')
    with pytest.raises(UsageError, match="no folder"):
        run_batch(llm, tmp_path / "in.jsonl", tmp_path / "nowhere" / "out.jsonl", {})
