"""Requests of a benchmark: the same ones for the same seed, of the wanted lengths, or those of a file."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright_bench.workload import (
    WARM_UP,
    WORDS,
    Lengths,
    WorkloadConfig,
    WorkloadRequest,
    synthetic,
    token_ids,
    workload,
    workload_config,
)

IDS = token_ids(307)


@pytest.mark.parametrize(
    ("text", "lengths"), [("128", (128, 128)), ("64:256", (64, 256)), (" 7:7 ", (7, 7)), ("1K:2k", (1024, 2048))]
)
def test_lengths_are_read(text: str, lengths: tuple[int, int]) -> None:
    assert Lengths.parse(text, "--input-len") == Lengths(*lengths)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1:", ":5", "5:4", "1:2:3", "1.5", "²", "1e3"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--output-len") as caught:
        Lengths.parse(text, "--output-len")
    assert caught.value.fix


def test_prompts_follow_the_seed_and_nothing_else() -> None:
    config = WorkloadConfig(num_prompts=50, input_len=Lengths(5, 9), output_len=Lengths(1, 4), seed=3)
    items = workload(config, IDS)
    assert items == workload(config, IDS)
    assert items != workload(WorkloadConfig(50, Lengths(5, 9), Lengths(1, 4), seed=4), IDS)
    other_inputs = workload(WorkloadConfig(50, Lengths(1, 2), Lengths(1, 4), seed=3), IDS)
    assert [item.max_tokens for item in other_inputs] == [item.max_tokens for item in items]
    warm_up = synthetic(config, IDS, 50, WARM_UP)
    assert not {str(item.prompt) for item in warm_up} & {str(item.prompt) for item in items}


def test_every_length_of_a_range_is_drawn() -> None:
    items = workload(WorkloadConfig(num_prompts=500, input_len=Lengths(5, 9), output_len=Lengths(1, 4)), IDS)
    assert set(Counter(len(item.prompt) for item in items)) == {5, 6, 7, 8, 9}
    assert set(Counter(item.max_tokens for item in items)) == {1, 2, 3, 4}
    tokens = {token for item in items for token in item.prompt}
    assert tokens == set(range(30, 307)), "all of the vocabulary but its first tenth"


@pytest.mark.parametrize("alphabet", [IDS, WORDS])
def test_a_shared_prefix_is_part_of_each_prompt(alphabet: Any) -> None:
    config = WorkloadConfig(num_prompts=9, input_len=Lengths(11, 13), shared_prefix_len=10)
    prompts = [item.prompt for item in workload(config, alphabet)]
    pieces = [prompt.split() if isinstance(prompt, str) else prompt for prompt in prompts]
    assert len({tuple(map(str, piece[:10])) for piece in pieces}) == 1
    assert len({str(piece[10]) for piece in pieces}) > 1
    assert {len(piece) for piece in pieces} == {11, 12, 13}


def test_words_are_words_once() -> None:
    assert len(set(WORDS)) == len(WORDS) > 50


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        ({"input_len": "8", "shared_prefix_len": 8}, "--shared-prefix-len 8"),
        ({"shared_prefix_len": -1}, "--shared-prefix-len is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"dataset": Path("x"), "shared_prefix_len": 3}, "does not go with --dataset"),
        ({"input_len": "9:3"}, "--input-len 9:3"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], piece: str) -> None:
    with pytest.raises(UsageError, match=piece):
        workload_config(**{"input_len": "128", "output_len": "64"} | options)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_dataset_has_texts_ids_and_messages(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"prompt": "Größe", "id": 7, "max_tokens": 3}',
        "",
        '{"prompt": [1, 2, 3]}',
        '{"prompt_token_ids": [4, 5], "max_tokens": null}',
        "[6, 7, 8]",
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}',
    )
    items = workload(WorkloadConfig(dataset=path, output_len=Lengths(5, 5)), IDS)
    messages = [{"role": "user", "content": "Hi"}]
    expected = [
        WorkloadRequest("Größe", 3, 1),
        WorkloadRequest([1, 2, 3], 5, 3),
        WorkloadRequest([4, 5], 5, 4),
        WorkloadRequest([6, 7, 8], 5, 5),
    ]
    assert items == [*expected, WorkloadRequest(messages, 9, 6)]
    assert workload(WorkloadConfig(dataset=path, num_prompts=2, output_len=Lengths(5, 5)), IDS) == items[:2]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "7",
        '"text"',
        "null",
        "{}",
        '{"prompt": ""}',
        '{"prompt": []}',
        "[]",
        '{"prompt": 7}',
        '{"prompt": ["a"]}',
        '{"prompt": [-1]}',
        '{"prompt": [1.5]}',
        '{"prompt": "a", "messages": []}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": "5"}',
        '{"messages": ["a"]}',
        "[" * 5000,
    ],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "good"}', line)
    with pytest.raises(UsageError, match=r"data\.jsonl, line 2"):
        workload(WorkloadConfig(dataset=path), IDS)


def test_a_dataset_is_utf8_with_a_byte_order_mark_or_without(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert [item.prompt for item in workload(WorkloadConfig(dataset=path), IDS)] == ["a"]
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=r"data\.jsonl, line 2: byte 13 of the line is not UTF-8"):
        workload(WorkloadConfig(dataset=path), IDS)


def test_a_dataset_that_is_missing_empty_or_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        workload(WorkloadConfig(dataset=tmp_path / "none"), IDS)
    with pytest.raises(UsageError, match="has no prompt"):
        workload(WorkloadConfig(dataset=written(tmp_path, "", " ")), IDS)
    with pytest.raises(UsageError, match=r"--num-prompts is 2: .* has 1"):
        workload(WorkloadConfig(dataset=written(tmp_path, '{"prompt": "a"}'), num_prompts=2), IDS)


def test_a_report_names_the_dataset_without_its_folder(tmp_path: Path) -> None:
    config = WorkloadConfig(dataset=written(tmp_path, '{"prompt": "a"}'))
    assert config.to_dict()["dataset"] == "data.jsonl"
