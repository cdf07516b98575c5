"""`engine bench profile`: where the time of a step goes, kernel by kernel, and how much of the roofline that is."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import Packer, Part, StepPlan
from enginewright_bench.machine_facts import machine_facts
from enginewright_bench.roofline import Roofline, measure_roofline, read_buffer

ROUND_SECONDS, ROUND_STEPS = 0.25, 3  # of each point in a round, at least
OPERANDS = ("int8", "bf16", "fp32")


@dataclass(frozen=True)
class Point:
    """A step of `sequences` sequences that have `depth` positions in the KV cache, and `tokens` new tokens each."""

    sequences: int
    tokens: int
    depth: int

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1

    def __str__(self) -> str:
        if not self.is_decode:
            return f"prefill of {self.tokens} tokens"
        many = f"{self.sequences} sequences" if self.sequences > 1 else "one sequence"
        return f"decode of {many} at depth {self.depth}"


@dataclass(frozen=True)
class ProfileConfig:
    """What is profiled.

    prefill: lengths of prompts, each read in one step. batch, depth: steps of so many sequences that decode, with so
    many positions in the KV cache, every batch at every depth. rounds: each measures the roofline, and then every step.

    Raises:
        UsageError: a number makes no sense.
    """

    prefill: tuple[int, ...] = (512,)
    batch: tuple[int, ...] = (1,)
    depth: tuple[int, ...] = (512,)
    rounds: int = 5

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}", "it must be at least 1")

    @property
    def points(self) -> list[Point]:
        prefills = [Point(1, tokens, 0) for tokens in self.prefill]
        return prefills + [Point(batch, 1, depth) for batch in self.batch for depth in self.depth]


def profile_config(
    prefill: tuple[int, ...], batch: tuple[int, ...], depth: tuple[int, ...], rounds: int
) -> ProfileConfig:
    """Of options that may be absent. Whoever names prompts alone, or decodes alone, wants nothing else."""
    some = ProfileConfig(rounds=rounds)
    if not (prefill or batch or depth):
        return some
    decodes = (batch or some.batch, depth or some.depth) if batch or depth else ((), ())
    return ProfileConfig(prefill, *decodes, rounds)


@dataclass(frozen=True)
class KernelProfile:
    """A kernel of the plan, or several of one name and shape together.

    Bytes are those that it touches, each counted once; ops are by operands, "int8", "bf16", "fp32" (struct Work in
    csrc/cpu/kernel.h). roofline_s: the least time that the roofline allows: for reading weights and KV, or for
    computing, whichever takes longer. Activations are expected to stay in caches.
    """

    kernel: str
    shape: str
    calls: int
    seconds: float
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    ops: Mapping[str, int]
    roofline_s: float

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def share_of_roofline(self) -> float:
        return self.roofline_s / self.seconds

    def to_dict(self, step_s: float) -> dict[str, Any]:
        return asdict(self) | {
            "bytes_per_s": self.nbytes / self.seconds,
            "ops_per_s": sum(self.ops.values()) / self.seconds,
            "share_of_roofline": self.share_of_roofline,
            "share_of_step": self.seconds / step_s,
        }

    @classmethod
    def sum(cls, parts: Sequence["KernelProfile"]) -> "KernelProfile":
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
    """One point: figures of one round, that of the median share of the roofline, so that they add up.

    step_s: of a step, from the call of the executor to its return. kernels: of the plan, in order. shares: of the
    roofline in all rounds, ascending.
    """

    point: Point
    roofline: Roofline
    step_s: float
    kernels: Sequence[KernelProfile]
    shares: Sequence[float]

    @property
    def share_of_roofline(self) -> float:
        return sum(kernel.roofline_s for kernel in self.kernels) / self.step_s

    @property
    def groups(self) -> list[KernelProfile]:
        """Kernels of one name and shape together, the longest first."""
        groups: dict[tuple[str, str], list[KernelProfile]] = {}
        for kernel in self.kernels:
            groups.setdefault((kernel.kernel, kernel.shape), []).append(kernel)
        return sorted(map(KernelProfile.sum, groups.values()), key=lambda group: -group.seconds)

    def to_dict(self) -> dict[str, Any]:
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
    """rooflines: with one thread and with all, weights read where they are mapped; fresh_rooflines: of fresh memory.
    Steps have their own, of reading weights and KV.
    """

    config: ProfileConfig
    engine: Mapping[str, Any]
    machine: Mapping[str, Any]
    rooflines: Sequence[Roofline]
    fresh_rooflines: Sequence[Roofline]
    steps: Sequence[StepProfile]

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "profile",
            "config": asdict(self.config),
            "engine": dict(self.engine),
            "machine": dict(self.machine),
            "rooflines": [roofline.to_dict() for roofline in self.rooflines],
            "fresh_rooflines": [roofline.to_dict() for roofline in self.fresh_rooflines],
            "steps": [step.to_dict() for step in self.steps],
        }


def run_profile(path: Path, config: ProfileConfig, threads: int | None = None) -> ProfileReport:
    """Profile an engine on this machine.

    Raises:
        UsageError: a step does not fit the engine.
        EngineError: the engine cannot be run.
    """
    facts = machine_facts()
    with Engine.open(path) as engine:
        executor = CpuExecutor(engine, _limits(engine, config, threads))
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
            executor.run(plan)  # warm-up
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
        }
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
    """A step of the scheduler's making, but for the prompts that come before it: their KV is zeros."""
    groups, limits = executor.plan.caches, executor.memory_plan.limits
    cache = Cache(groups, executor.memory_plan.num_blocks, limits.tokens, limits.sequences)
    new_blocks: tuple[list[int], ...] = tuple([] for _ in groups)
    nothing: tuple[list[Any], ...] = tuple([] for _ in groups)
    length = point.depth + point.tokens
    packer, parts = Packer(groups, limits), []
    for index in range(point.sequences):
        held = cache.admit(length)
        assert held is not None, "_limits() makes room"
        for start in range(0, length, limits.tokens):  # as it would have been read, so that windows drop their blocks
            cache.extend(held, start, min(start + limits.tokens, length), new_blocks, nothing)
        tokens = [(index * 997 + place * 7919) % executor.plan.vocab_size for place in range(length)]
        sequence = TokenSequence(tokens, length, length, num_computed_tokens=point.depth, held=held)
        packer.place(sequence)
        parts.append(Part(sequence, point.depth, point.tokens, 1))
    num_decodes = len(parts) if point.is_decode else 0
    sizes, inputs = packer.pack(parts, num_decodes, ())
    for pool, blocks in zip(executor.pools, new_blocks, strict=True):
        pool.scrub(blocks)
    return StepPlan(tuple(parts), num_decodes, sizes, inputs, nothing, nothing)


def _kv_memory(executor: CpuExecutor, plan: StepPlan) -> list[NDArray[Any]]:
    """The blocks and slots of a step, to be read with the weights: caches keep less of both than of weights alone."""
    return [
        pool.places()[place]
        for part in plan.parts
        for pool, held in zip(executor.pools, part.sequence.held, strict=True)
        for place in held.held
    ]


def _measure(executor: CpuExecutor, point: Point, plan: StepPlan, roofline: Roofline) -> StepProfile:
    """Means over the faster half of the steps: kernels still add up, and an interruption is left out."""
    steps: list[tuple[float, NDArray[np.int64]]] = []
    begin = time.perf_counter()
    while len(steps) < ROUND_STEPS or time.perf_counter() - begin < ROUND_SECONDS:
        start = time.perf_counter()
        nanoseconds, work = executor.profile(plan)
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
    """What tells kernels of one name apart: its weight's rows x columns, its heads, or its widest operand."""
    operands = call.operands.values()
    forms = [engine.weight(operand.name)[1] for operand in operands if isinstance(operand, WeightOperand)]
    matrix = max((form.shape for form in forms if form.shape is not None and len(form.shape) == 2), default=None)
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
