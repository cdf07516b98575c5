"""`engine bench profile`: the time of a step, kernel by kernel, and its share of the roofline."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import UsageError
from enginewright.manifest import WEIGHTS
from enginewright.plan import BufferOperand, KernelCall, WeightOperand
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.device.ranks.executor import RankedExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.sequence import CacheHandle, TokenSequence
from enginewright.runtime.step.step_plan import ScheduledTokens, StepPlan
from enginewright_bench.machine_facts import machine_facts
from enginewright_bench.roofline import Roofline, measure_roofline, read_buffer

ROUND_SECONDS, ROUND_STEPS = 0.25, 3  # minimum for each point in a round
OPERANDS = ("int8", "bf16", "fp32")


@dataclass(frozen=True)
class Point:
    """A step to profile."""

    sequences: int  # number of sequences
    tokens: int  # new tokens of each sequence
    depth: int  # positions of each sequence in the KV cache

    @property
    def is_decode(self) -> bool:
        """True if every sequence has one token."""
        return self.tokens == 1

    def __str__(self) -> str:
        if not self.is_decode:
            return f"prefill of {self.tokens} tokens"
        many = f"{self.sequences} sequences" if self.sequences > 1 else "one sequence"
        return f"decode of {many} at depth {self.depth}"


@dataclass(frozen=True)
class ProfileConfig:
    """Options of the profile.

    Raises:
        UsageError: a number makes no sense.
    """

    prefill: tuple[int, ...] = (512,)  # lengths of prompts, each computed in one step
    batch: tuple[int, ...] = (1,)  # numbers of sequences that decode, each at every depth
    depth: tuple[int, ...] = (512,)  # positions of each sequence in the KV cache
    rounds: int = 5  # rounds, each of which measures the roofline, and then every step

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}", "it must be at least 1")

    @property
    def points(self) -> list[Point]:
        """Steps to profile."""
        prefills = [Point(1, tokens, 0) for tokens in self.prefill]
        return prefills + [Point(batch, 1, depth) for batch in self.batch for depth in self.depth]


def profile_config(
    prefill: tuple[int, ...], batch: tuple[int, ...], depth: tuple[int, ...], rounds: int
) -> ProfileConfig:
    """Makes the config from options that may be empty: with prompts alone, or decodes alone, there is nothing else.

    Args:
        prefill: lengths of prompts.
        batch: numbers of sequences that decode.
        depth: positions in the KV cache.
        rounds: number of rounds.
    """
    some = ProfileConfig(rounds=rounds)
    if not (prefill or batch or depth):
        return some
    decodes = (batch or some.batch, depth or some.depth) if batch or depth else ((), ())
    return ProfileConfig(prefill, *decodes, rounds)


@dataclass(frozen=True)
class KernelProfile:
    """A kernel call of the plan, or the sum of several with the same name and shape.

    Bytes are those that it touches, each counted once. Activations are expected to stay in caches.
    """

    kernel: str  # versioned name
    shape: str  # text that tells kernels of one name apart
    calls: int  # number of calls
    seconds: float  # time of all calls
    weight_bytes: int  # bytes of weights
    activation_bytes: int  # bytes of activations
    kv_bytes: int  # bytes of KV caches and states
    ops: Mapping[str, int]  # operands, "int8", "bf16" or "fp32" → operations (struct Work in csrc/cpu/kernel.h)
    # minimum of seconds on the roofline: for reading weights and KV, or for computing, whichever takes longer
    roofline_s: float

    @property
    def nbytes(self) -> int:
        """Bytes that the calls touch."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def share_of_roofline(self) -> float:
        """Minimum of the time over the measured time."""
        return self.roofline_s / self.seconds

    def to_dict(self, step_s: float) -> dict[str, Any]:
        """Converts the profile for a JSON report."""
        return asdict(self) | {
            "bytes_per_s": self.nbytes / self.seconds,
            "ops_per_s": sum(self.ops.values()) / self.seconds,
            "share_of_roofline": self.share_of_roofline,
            "share_of_step": self.seconds / step_s,
        }

    @classmethod
    def sum(cls, parts: Sequence["KernelProfile"]) -> "KernelProfile":
        """Adds up kernels of one name and shape."""
        first = parts[0]
        return cls(
            kernel=first.kernel,
            shape=first.shape,
            calls=sum(part.calls for part in parts),
            seconds=sum(part.seconds for part in parts),
            weight_bytes=sum(part.weight_bytes for part in parts),
            activation_bytes=sum(part.activation_bytes for part in parts),
            kv_bytes=sum(part.kv_bytes for part in parts),
            ops={name: sum(part.ops[name] for part in parts) for name in OPERANDS},
            roofline_s=sum(part.roofline_s for part in parts),
        )


@dataclass(frozen=True)
class StepProfile:
    """The profile of one step: figures of the round with the median share of the roofline, so that they add up."""

    point: Point  # the step
    roofline: Roofline  # roofline of the round
    step_s: float  # seconds of a step, from the call of the executor to its return
    kernels: Sequence[KernelProfile]  # kernels of the plan, in order
    shares: Sequence[float]  # share of the roofline in each round, ascending

    @property
    def share_of_roofline(self) -> float:
        """Minimum of the step's time over the measured time."""
        return sum(kernel.roofline_s for kernel in self.kernels) / self.step_s

    @property
    def groups(self) -> list[KernelProfile]:
        """Sums of kernels with the same name and shape, the longest first."""
        groups: dict[tuple[str, str], list[KernelProfile]] = {}
        for kernel in self.kernels:
            groups.setdefault((kernel.kernel, kernel.shape), []).append(kernel)
        return sorted(map(KernelProfile.sum, groups.values()), key=lambda group: -group.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Converts the profile for a JSON report."""
        point = self.point
        return {
            **asdict(point),
            "step_s": self.step_s,
            "tokens_per_s": point.sequences * point.tokens / self.step_s,
            "share_of_roofline": self.share_of_roofline,
            "shares_of_roofline": list(self.shares),
            "roofline": self.roofline.to_dict(),
            "groups": [group.to_dict(self.step_s) for group in self.groups],
            "kernels": [kernel.to_dict(self.step_s) for kernel in self.kernels],
        }


@dataclass(frozen=True)
class ProfileReport:
    """The result of the benchmark. Steps have rooflines of their own, with reads of weights and KV."""

    config: ProfileConfig  # options
    engine: Mapping[str, Any]  # name, recipe, hash, instruction set and threads
    machine: Mapping[str, Any]  # facts about the machine
    rooflines: Sequence[Roofline]  # with one thread and with all, reading weights where they are mapped
    fresh_rooflines: Sequence[Roofline]  # the same, reading fresh memory
    steps: Sequence[StepProfile]  # profiles of the steps

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON's types."""
        return {
            "benchmark": "profile",
            "config": asdict(self.config),
            "engine": dict(self.engine),
            "machine": dict(self.machine),
            "rooflines": [roofline.to_dict() for roofline in self.rooflines],
            "fresh_rooflines": [roofline.to_dict() for roofline in self.fresh_rooflines],
            "steps": [step.to_dict() for step in self.steps],
        }


def run_profile(path: Path, config: ProfileConfig, threads: int | None = None, ranks: int = 1) -> ProfileReport:
    """Profiles an engine on this machine.

    Args:
        path: engine file.
        config: options.
        threads: threads of the executor; None is the default.
        ranks: number of processes that compute the model together; kernels are those of the first one, and exchanges
            are among them.

    Raises:
        UsageError: a step does not fit the engine.
        EngineError: the engine cannot be run.
    """
    facts = machine_facts()
    with Engine.open(path) as engine:
        limits = replace(_limits(engine, config, threads), tensor_parallel_size=ranks)
        executor = RankedExecutor(engine, limits) if ranks > 1 else CpuExecutor(engine, limits)
        weights = [engine.file.section(name) for name in engine.file.sections if name.startswith(WEIGHTS)]
        counts, fresh = sorted({1, executor.threads}), [read_buffer()]
        fresh_rooflines = [measure_roofline(executor.isa, count, fresh) for count in counts]
        rooflines = [
            measure_roofline(roofline.isa, roofline.threads, weights, dots=roofline.dots)
            for roofline in fresh_rooflines
        ]
        del fresh
        plans = [step_plan(executor, point) for point in config.points]
        reads = [[*weights, *_kv_memory(executor, plan)] for plan in plans]
        rounds: list[list[StepProfile]] = [[] for _ in plans]
        for plan in plans:
            executor.run(plan.inputs)  # warm-up
        for _ in range(config.rounds):
            for point, plan, memory, results in zip(config.points, plans, reads, rounds, strict=True):
                roofline = measure_roofline(executor.isa, executor.threads, memory)
                results.append(_measure(executor, point, plan, roofline))
        about = {
            "name": engine.manifest.name,
            "recipe": engine.manifest.recipe,
            "content_hash": engine.manifest.content_hash,
            "isa": executor.isa,
            "threads": executor.threads,
            "ranks": ranks,
        }
        executor.close()
    return ProfileReport(config, about, facts, rooflines, fresh_rooflines, [_middle(results) for results in rounds])


def _limits(engine: Engine, config: ProfileConfig, threads: int | None) -> RuntimeConfig:
    points = config.points
    length = max(point.depth + point.tokens for point in points)
    if length > engine.plan.max_seq_len:
        raise UsageError(
            f"a sequence of {length} positions is longer than the engine was built for",
            f"its limit is {engine.plan.max_seq_len}",
            "Use a smaller --prefill or --depth.",
        )
    sequences = max(point.sequences for point in points)
    tokens = max(point.sequences * point.tokens for point in points)
    return RuntimeConfig(
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        kv_cache_memory=sequences * sequence_bytes(engine.plan.caches, length, tokens),
        threads=threads,
    )


def step_plan(executor: CpuExecutor, point: Point) -> StepPlan:
    """Makes a step as the scheduler does, without the prompts that come before it: their KV is zeros.

    Args:
        executor: the executor.
        point: sizes of the step.
    """
    groups, limits = executor.plan.caches, executor.memory_plan.limits
    cache = Cache(groups, executor.memory_plan.num_blocks, limits.tokens, limits.sequences)
    new_blocks: tuple[list[int], ...] = tuple([] for _ in groups)
    nothing: tuple[list[Any], ...] = tuple([] for _ in groups)
    length = point.depth + point.tokens
    packer, scheduled = Packer(groups, limits), []
    for index in range(point.sequences):
        held = cache.admit(length)
        assert held is not None, "_limits() makes room"
        for start in range(0, length, limits.tokens):  # prompts are read in chunks, so that windows drop their blocks
            cache.extend(held, start, min(start + limits.tokens, length), new_blocks, nothing)
        tokens = [(index * 997 + place * 7919) % executor.plan.vocab_size for place in range(length)]
        sequence = TokenSequence(tokens, length, length, cache=CacheHandle(held))
        packer.place(sequence)
        scheduled.append(ScheduledTokens(sequence, point.depth, point.tokens, 1))
    num_decodes = len(scheduled) if point.is_decode else 0
    sizes, arrays = packer.pack(scheduled, num_decodes, ())
    for pool, blocks in zip(executor.pools, new_blocks, strict=True):
        pool.scrub(blocks)
    return StepPlan(StepInputs(sizes, arrays, nothing, nothing), tuple(scheduled), num_decodes)


def _kv_memory(executor: CpuExecutor, plan: StepPlan) -> list[NDArray[Any]]:
    """Lists the blocks and slots of a step; they are read with the weights, since CPU caches hold less of both."""
    return [
        pool.places()[place]
        for one in plan.scheduled
        for pool, held in zip(executor.pools, one.sequence.cache.held, strict=True)
        for place in held.held
    ]


def _measure(executor: CpuExecutor, point: Point, plan: StepPlan, roofline: Roofline) -> StepProfile:
    """Averages the faster half of the steps: kernels still add up, and interruptions are left out."""
    steps: list[tuple[float, NDArray[np.int64]]] = []
    begin = time.perf_counter()
    while len(steps) < ROUND_STEPS or time.perf_counter() - begin < ROUND_SECONDS:
        start = time.perf_counter()
        nanoseconds, work = executor.profile(plan.inputs)
        steps.append((time.perf_counter() - start, nanoseconds))
    faster = sorted(steps, key=itemgetter(0))[: (len(steps) + 1) // 2]
    seconds = np.mean([each for _, each in faster], axis=0) * 1e-9
    kernels = [
        _kernel(call, executor.engine, roofline, float(took), did)
        for call, took, did in zip(executor.plan.calls, seconds, work, strict=True)
    ]
    step_s = statistics.mean(took for took, _ in faster)
    return StepProfile(point, roofline, step_s, kernels, [sum(kernel.roofline_s for kernel in kernels) / step_s])


def _kernel(call: KernelCall, engine: Engine, roofline: Roofline, seconds: float, work: np.void) -> KernelProfile:
    ops = {name: int(work[f"{name}_ops"]) for name in OPERANDS}
    weight_bytes, kv_bytes = int(work["weight_bytes"]), int(work["kv_bytes"])
    return KernelProfile(
        kernel=call.kernel,
        shape=_shape(call, engine),
        calls=1,
        seconds=seconds,
        weight_bytes=weight_bytes,
        activation_bytes=int(work["activation_bytes"]),
        kv_bytes=kv_bytes,
        ops=ops,
        roofline_s=roofline.seconds(weight_bytes + kv_bytes, ops),
    )


def _shape(call: KernelCall, engine: Engine) -> str:
    """Makes the text that tells kernels of one name apart: weight's rows x columns, heads, or widest operand."""
    operands = call.operands.values()
    weights = [operand for operand in operands if isinstance(operand, WeightOperand)]
    forms = [(engine.weight(weight.name)[1], weight) for weight in weights]
    matrices = [part_of_weight(form, weight) for form, weight in forms if form.shape and len(form.shape) == 2]
    matrix = max((part.shape[1:] for part in matrices), default=None)
    if matrix is not None:
        gated = str(call.attributes.get("epilogue", "none"))
        return f"{matrix[0]} x {matrix[1]}" + ("" if gated == "none" else f" {gated}")
    if "kv_heads" in call.attributes:
        window = call.attributes.get("window", 0)
        heads, kv_heads, head_dim = (call.attributes[name] for name in ("heads", "kv_heads", "head_dim"))
        return f"{heads}/{kv_heads} x {head_dim}" + (f" of {window}" if window else "")
    return str(max(operand.columns for operand in operands if isinstance(operand, BufferOperand)))


def _middle(rounds: Sequence[StepProfile]) -> StepProfile:
    ordered = sorted(rounds, key=lambda each: each.share_of_roofline)
    middle = ordered[len(ordered) // 2]
    shares = [each.share_of_roofline for each in ordered]
    return StepProfile(middle.point, middle.roofline, middle.step_s, middle.kernels, shares)
