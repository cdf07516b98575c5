"""`engine bench offline` on a tiny engine: its figures are those of what was run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginewright import _cpu
from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM
from enginewright_bench.offline import OfflineConfig, OfflineReport, Round, run_offline
from enginewright_bench.report import describe_offline
from enginewright_bench.workload import Lengths, WorkloadConfig

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1, "kv_cache_memory": 8 << 20}
WORK = WorkloadConfig(num_prompts=7, input_len=Lengths(3, 20), output_len=Lengths(2, 9))


def test_figures_are_those_of_the_rounds(engine_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_offline(engine_path, OfflineConfig(WORK, warm_up=1, rounds=3), **LIMITS)
    assert len(report.rounds) == 3
    first = report.rounds[0]
    assert (first.requests, first.preemptions, first.cached_prompt_tokens) == (7, 0, 0)
    assert 7 * 2 <= first.generated_tokens <= 7 * 9 and 7 * 3 <= first.prompt_tokens <= 7 * 20
    # The last token of a completion is sampled and never read.
    assert first.computed_tokens == first.prompt_tokens + first.generated_tokens - 7
    assert first.steps >= 9 - 1
    for entry in report.rounds:
        assert (entry.prompt_tokens, entry.generated_tokens) == (first.prompt_tokens, first.generated_tokens)
    rates = sorted(entry.generated_tokens / entry.duration_s for entry in report.rounds)
    assert report.rates["generated_tokens_per_s"] == rates[1]
    assert 0 < report.ttft_ms.mean < report.e2e_ms.max <= max(entry.duration_s for entry in report.rounds) * 1e3
    said = capsys.readouterr()
    assert said.out == "" and [line.split(":")[0] for line in said.err.splitlines()] == [
        "[warm-up",
        "[round 1 of 3",
        "[round 2 of 3",
        "[round 3 of 3",
    ]


def test_a_shared_prefix_is_read_once_a_round(engine_path: Path) -> None:
    work = WorkloadConfig(num_prompts=6, input_len=Lengths(80, 80), output_len=Lengths(2, 2), shared_prefix_len=64)
    config = OfflineConfig(work, rounds=2, warm_up=1)
    report = run_offline(engine_path, config, **LIMITS | {"max_num_seqs": 1, "max_num_batched_tokens": 128})
    spared = [entry.cached_prompt_tokens for entry in report.rounds]
    assert spared[0] == spared[1] == 5 * 64, "nothing is left of the round before"
    without = run_offline(engine_path, config, **LIMITS, enable_prefix_caching=False)
    assert [entry.cached_prompt_tokens for entry in without.rounds] == [0, 0]


def test_a_dataset_is_encoded_by_the_engine(engine_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "Hi"}]}\n[5, 6]\n')
    report = run_offline(engine_path, OfflineConfig(WorkloadConfig(dataset=path), warm_up=0, rounds=1), **LIMITS)
    assert report.rounds[0].requests == 3 and report.rounds[0].generated_tokens == 3 + 64 + 64
    assert report.to_dict()["config"]["num_prompts"] == 3


@pytest.mark.parametrize(
    ("line", "piece"),
    [
        ("[1, 400]", "line 2: the prompt has a token that is none"),
        ('{"prompt": "a", "max_tokens": 600}', "do not fit 512 positions"),
    ],
)
def test_a_prompt_that_the_engine_cannot_answer_in_full_is_named(
    engine_path: Path, tmp_path: Path, line: str, piece: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(UsageError, match=piece):
        run_offline(engine_path, OfflineConfig(WorkloadConfig(dataset=path)), **LIMITS)


def test_synthetic_prompts_beyond_the_engine_are_refused(engine_path: Path) -> None:
    work = WorkloadConfig(input_len=Lengths(500, 500), output_len=Lengths(13, 13))
    with pytest.raises(UsageError, match="prompt 1: 500 tokens and a completion of 13 do not fit 512"):
        run_offline(engine_path, OfflineConfig(work), **LIMITS)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"warm_up": -1}])
def test_numbers_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        OfflineConfig(WORK, **options)


def test_the_report_for_people_and_for_programs(engine_path: Path) -> None:
    report = run_offline(engine_path, OfflineConfig(WORK, warm_up=0, rounds=2), **LIMITS)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["config"]["limits"] == LIMITS and found["config"]["input_len"] == "3:20"
    assert len(found["rounds"]) == 2 and found["engine"]["recipe"]["quant"] == "bf16"
    assert (found["engine"]["isa"], found["engine"]["threads"]) == (_cpu.isa_names()[0], 1)
    assert str(engine_path.parent) not in json.dumps(found)
    lines = describe_offline(report).splitlines()
    assert lines[0].startswith("tiny-llama (") and "quant bf16" in lines[0] and "threads 1" in lines[0]
    assert lines[1] == "7 prompts, 3:20 tokens in, 2:9 out, seed 0; 2 rounds"


@pytest.mark.usefixtures("speculation_pays")
def test_rounds_with_draft_tokens_next_to_rounds_without(
    engine_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("[5, 6, 7, 5, 6, 7, 5, 6]\n[9, 8, 9, 8, 9, 8]\n")
    config = OfflineConfig(WorkloadConfig(dataset=path, output_len=Lengths(30, 30)), rounds=2, compare=True)
    report = run_offline(engine_path, config, **LIMITS, speculate="ngram")
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        *("[warm-up without speculation", "[warm-up", "[round 1 of 2", "[round 1 of 2 without speculation"),
        *("[round 2 of 2 without speculation", "[round 2 of 2"),
    ]
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    with_draft_tokens, without = found["rounds"][0], found["comparison"]["rounds"][0]
    assert with_draft_tokens["draft_tokens"] > with_draft_tokens["accepted_tokens"] > 0 == without["draft_tokens"]
    assert with_draft_tokens["steps"] < without["steps"]
    assert with_draft_tokens["generated_tokens"] == without["generated_tokens"] == 60
    assert (found["comparison"]["answers"], found["comparison"]["differing_answers"]) == (4, 0)
    rates = [
        one["generated_tokens_per_s"] / other["generated_tokens_per_s"]
        for one, other in zip(found["rounds"], found["comparison"]["rounds"], strict=True)
    ]
    assert found["comparison"]["ratios"] == rates and found["comparison"]["ratio"] == sum(rates) / 2
    accepted, steps = (sum(one[name] for one in found["rounds"]) for name in ("accepted_tokens", "draft_steps"))
    assert found["mean_length"] == 1 + accepted / steps > 1
    text = describe_offline(report)
    acceptance = f"accepted: {found['mean_length']:.2f} tokens by a step"
    for piece in ("draft tokens    ", acceptance, "same completions      4 of 4"):
        assert piece in text


def test_an_answer_that_draft_tokens_have_changed_is_counted(
    engine_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens change no completion, so the test replaces the one without them by another."""
    generate = LLM.generate

    def changed(llm: LLM, *arguments: Any, **named: Any) -> Any:
        outputs = generate(llm, *arguments, **named)
        if llm.stats().speculation is None:
            outputs[0].outputs[0].token_ids[-1] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", changed)
    config = OfflineConfig(WORK, warm_up=0, rounds=2, compare=True)
    report = run_offline(engine_path, config, **LIMITS, speculate="ngram")
    assert report.comparison is not None and (report.comparison.answers, report.comparison.differing_answers) == (14, 2)
    assert "12 of 14" in describe_offline(report)
    without_draft_tokens = replace(report, rounds=report.comparison.rounds)
    assert without_draft_tokens.mean_length is None and "draft tokens          none" in describe_offline(
        without_draft_tokens
    )


def test_a_comparison_of_nothing(engine_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to compare: speculation is off\nAdd --speculate ngram or"):
        run_offline(engine_path, OfflineConfig(WORK, compare=True), **LIMITS)


def test_a_median_of_rounds_has_its_range() -> None:
    def lasting(seconds: float) -> Round:
        return Round(seconds, 2 * seconds, 10, 1000, 128, 1200, 300, 40, int(seconds))

    rounds = [lasting(seconds) for seconds in (1.0, 4.0, 2.0, 5.0)]
    engine = {"name": "x", "recipe": {"quant": "bf16"}, "isa": "avx512", "threads": 2}
    text = describe_offline(
        OfflineReport(OfflineConfig(WORK), engine, {}, {"cpu": "A CPU", "cores": 1}, rounds, [1.0], [2.0])
    )
    assert "A CPU, 1 core; avx512, 2 threads\n" in text
    assert "generated tokens/s    112.5 (60.00 to 300.0)" in text
    assert "tokens/CPU-second     56.25 (30.00 to 150.0)" in text
    assert "preemptions           1 to 5" in text and "128 of 1,000 prompt tokens" in text
