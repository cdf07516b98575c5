"""`engine bench offline`: all requests at once through LLM.generate, without a server."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.config import SPECULATE
from enginewright.runtime.core.outputs import RequestOutput
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.speculation.stats import SpeculationStats
from enginewright_bench.figures import PERCENTILE_METHOD, Distribution
from enginewright_bench.machine_facts import machine_facts
from enginewright_bench.workload import WorkloadConfig, WorkloadRequest, token_ids, workload


@dataclass(frozen=True)
class OfflineConfig:
    """Options of the benchmark.

    Raises:
        UsageError: a number makes no sense.
    """

    workload: WorkloadConfig  # requests
    warm_up: int = 1  # rounds of the whole workload that are not counted
    rounds: int = 3  # rounds of the whole workload
    compare: bool = False  # True if each round also runs without speculation, next to the one with it

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}", "it must be at least 1")
        if self.warm_up < 0:
            raise UsageError(f"--warm-up is {self.warm_up}", "it must not be negative")


@dataclass(frozen=True)
class Round:
    """Totals of a round."""

    duration_s: float  # seconds
    cpu_s: float  # CPU time of the process, in seconds
    requests: int  # number of requests
    prompt_tokens: int  # tokens of prompts, including cached ones
    cached_prompt_tokens: int  # tokens of prompts that the prefix cache had
    computed_tokens: int  # positions that the model computed, again after a preemption
    generated_tokens: int  # tokens of completions
    steps: int  # steps of the engine
    preemptions: int  # preempted sequences
    draft_steps: int = 0  # sequences, summed over steps, that had draft tokens
    draft_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted

    @property
    def rates(self) -> dict[str, float]:
        """Rates of the round, by name."""
        tokens = self.prompt_tokens + self.generated_tokens
        return {
            "requests_per_s": self.requests / self.duration_s,
            "prompt_tokens_per_s": self.prompt_tokens / self.duration_s,
            "generated_tokens_per_s": self.generated_tokens / self.duration_s,
            "total_tokens_per_s": tokens / self.duration_s,
            "generated_tokens_per_cpu_s": self.generated_tokens / self.cpu_s,
        }


@dataclass(frozen=True)
class Comparison:
    """Rounds without speculation, each right before or right after the one with it."""

    rounds: Sequence[Round]  # rounds without speculation
    ratios: Sequence[float]  # for each pair of rounds, generated tokens per second with speculation over those without
    answers: int  # completions of all rounds
    differing_answers: int  # completions whose tokens speculation has changed

    def to_dict(self) -> dict[str, Any]:
        """Converts the comparison for a JSON report."""
        return {
            "ratio": statistics.median(self.ratios),
            "ratios": list(self.ratios),
            "answers": self.answers,
            "differing_answers": self.differing_answers,
            "rounds": [asdict(entry) | entry.rates for entry in self.rounds],
        }


@dataclass(frozen=True)
class OfflineReport:
    """The result of the benchmark."""

    config: OfflineConfig  # options
    engine: Mapping[str, Any]  # name, recipe, hash, instruction set and threads
    limits: Mapping[str, Any]  # fields of RuntimeConfig
    machine: Mapping[str, Any]  # facts about the machine
    rounds: Sequence[Round]  # totals of the rounds
    first_token_s: Sequence[float]  # seconds from arrival to first token, for each request of all rounds
    total_s: Sequence[float]  # seconds from arrival to the end, for each request of all rounds
    comparison: Comparison | None = None  # rounds without speculation, if requested

    @property
    def mean_length(self) -> float | None:
        """Mean number of tokens of a sequence by a step with draft tokens; None if there were none."""
        steps = sum(entry.draft_steps for entry in self.rounds)
        return 1 + sum(entry.accepted_tokens for entry in self.rounds) / steps if steps else None

    @property
    def ttft_ms(self) -> Distribution:
        """Distribution of the time to the first token."""
        return _distribution(self.first_token_s)

    @property
    def e2e_ms(self) -> Distribution:
        """Distribution of the time from arrival to the end."""
        return _distribution(self.total_s)

    @property
    def rates(self) -> dict[str, float]:
        """Medians of the rounds."""
        each = [entry.rates for entry in self.rounds]
        return {name: statistics.median(rates[name] for rates in each) for name in each[0]}

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON's types."""
        return {
            "benchmark": "offline",
            "config": {
                **self.config.workload.to_dict(),
                "num_prompts": self.rounds[0].requests,
                "warm_up": self.config.warm_up,
                "rounds": self.config.rounds,
                "limits": dict(self.limits),
            },
            "engine": dict(self.engine),
            "machine": dict(self.machine),
            "percentiles": PERCENTILE_METHOD,
            **self.rates,
            "ttft_ms": asdict(self.ttft_ms),
            "e2e_ms": asdict(self.e2e_ms),
            "mean_length": self.mean_length,
            "rounds": [asdict(entry) | entry.rates for entry in self.rounds],
            "comparison": self.comparison and self.comparison.to_dict(),
        }


def _distribution(seconds: Sequence[float]) -> Distribution:
    found = Distribution.of_seconds(seconds)
    assert found is not None  # there is at least one prompt
    return found


def run_offline(path: Path, config: OfflineConfig, **limits: Any) -> OfflineReport:
    """Runs the workload in rounds, and prints a line on stderr after each.

    Every round has the same requests, and a prefix cache without entries of the rounds before.

    Args:
        path: engine file.
        config: options.
        limits: fields of RuntimeConfig.

    Raises:
        UsageError: workload or limits make no sense, or do not go together.
        EngineError: the engine cannot be run.
    """
    facts = machine_facts("tokenizers")
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(path, **limits))
        plain = stack.enter_context(_without_speculation(llm, limits)) if config.compare else None
        items = workload(config.workload, token_ids(llm.engine.plan.vocab_size))
        prompts, params = _requests(llm, config.workload, items)
        rounds: list[Round] = []
        outputs: list[RequestOutput] = []
        plain_rounds: list[Round] = []
        plain_outputs: list[RequestOutput] = []
        runs = [(llm, "", rounds, outputs)]
        if plain is not None:
            runs.append((plain, " without speculation", plain_rounds, plain_outputs))
        for number in range(1 - config.warm_up, config.rounds + 1):
            name = f"round {number} of {config.rounds}" if number > 0 else "warm-up"
            for one, kind, own_rounds, own_outputs in runs if number % 2 else reversed(runs):
                measured, answers = _round(one, prompts, params, salt=f"round {number}")
                pace = f"{measured.generated_tokens / measured.duration_s:.1f} generated tokens/s"
                print(f"[{name}{kind}: {measured.duration_s:.2f} s, {pace}]", file=sys.stderr, flush=True)
                if number > 0:
                    own_rounds.append(measured)
                    own_outputs += answers
        manifest = llm.engine.manifest
        engine = {
            "name": manifest.name,
            "recipe": manifest.recipe,
            "content_hash": manifest.content_hash,
            "isa": llm.isa,
            "threads": llm.threads,
        }
    first = [output.metrics.first_token_s for output in outputs]
    total = [output.metrics.total_s for output in outputs]
    comparison = _compared(rounds, outputs, plain_rounds, plain_outputs) if config.compare else None
    return OfflineReport(config, engine, limits, facts, rounds, first, total, comparison)


def _without_speculation(llm: LLM, limits: Mapping[str, Any]) -> LLM:
    """Opens the engine again with the same limits. Raises UsageError if `llm` does not speculate either."""
    if llm.stats().speculation is None:
        raise UsageError(
            "there is nothing to compare", "speculation is off", f"Add --speculate {' or '.join(SPECULATE[1:])}."
        )
    return LLM(llm.engine, **{**limits, "speculate": "off"})


def _compared(
    rounds: Sequence[Round],
    outputs: Sequence[RequestOutput],
    plain_rounds: Sequence[Round],
    plain_outputs: Sequence[RequestOutput],
) -> Comparison:
    pace = "generated_tokens_per_s"
    ratios = [one.rates[pace] / other.rates[pace] for one, other in zip(rounds, plain_rounds, strict=True)]
    differing = sum(
        one.outputs[0].token_ids != other.outputs[0].token_ids
        for one, other in zip(outputs, plain_outputs, strict=True)
    )
    return Comparison(plain_rounds, ratios, len(outputs), differing)


def _requests(
    llm: LLM, config: WorkloadConfig, items: Sequence[WorkloadRequest]
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Makes token ids and parameters of each request. Raises UsageError if one does not fit the engine."""
    prompts, params = [], []
    for number, item in enumerate(items, start=1):
        try:
            ids = llm.encode(item.prompt)
            wanted = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=config.ignore_eos)
            llm.check(ids, wanted)
            if len(ids) + item.max_tokens > llm.max_model_len:
                raise UsageError(
                    f"{len(ids)} tokens and a completion of {item.max_tokens} do not fit {llm.max_model_len} positions",
                    fix="Use shorter ones, or raise --max-model-len if the engine's own limit is higher.",
                )
        except UsageError as error:
            where = f"prompt {number}" if item.line is None else f"{config.dataset}, line {item.line}"
            raise UsageError(where, f"{error.what}: {error.why}" if error.why else error.what, error.fix) from error
        prompts.append(ids)
        params.append(wanted)
    return prompts, params


def _round(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], salt: str
) -> tuple[Round, list[RequestOutput]]:
    before, cpu, start = llm.stats(), time.process_time(), time.perf_counter()
    outputs = llm.generate(prompts, params, cache_salt=salt)
    seconds, cpu, after = time.perf_counter() - start, time.process_time() - cpu, llm.stats()
    if any(output.outputs[0].finish_reason == "error" for output in outputs):
        raise EngineError("the model's logits are not numbers", fix="Check the engine with `engine verify`.")
    measured = Round(
        duration_s=seconds,
        cpu_s=cpu,
        requests=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        cached_prompt_tokens=sum(output.num_cached_tokens for output in outputs),
        computed_tokens=after.computed_tokens - before.computed_tokens,
        generated_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        steps=after.num_steps - before.num_steps,
        preemptions=after.num_preemptions - before.num_preemptions,
        **_speculation_fields(before.speculation, after.speculation),
    )
    return measured, outputs


def _speculation_fields(before: SpeculationStats | None, after: SpeculationStats | None) -> dict[str, int]:
    """Computes the fields of a Round that count draft tokens."""
    if before is None or after is None:
        return {}
    return {
        "draft_steps": after.num_drafts - before.num_drafts,
        "draft_tokens": sum(after.drafted) - sum(before.drafted),
        "accepted_tokens": sum(after.accepted) - sum(before.accepted),
    }
