"""Runs plans on the CPU: binds a plan's operands to memory, and passes each step to the C++ executor in one call."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.adapter_file import AdapterFile, SiteAdapter
from enginewright.adapter_plan import max_site_rank, max_top
from enginewright.dtypes import KV_CACHES
from enginewright.engine_header import ALIGN
from enginewright.errors import CorruptEngineError, EngineError, NoCodeForMachineError, NotEnoughMemoryError, UsageError
from enginewright.plan import (
    HIDDEN,
    HIDDEN_BEFORE,
    AdaptersOperand,
    Buffer,
    BufferOperand,
    CacheGroup,
    CacheOperand,
    InputOperand,
    KernelCall,
    Operand,
    PagedCache,
    WeightOperand,
    cache_of,
)
from enginewright.rank_layout import GATHER, NEXT, PREVIOUS
from enginewright.rank_plan import ALL_GATHER, ROOT
from enginewright.runtime import env
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.adapters import model_plan, num_slots
from enginewright.runtime.device.cpu.adapter_parts import part_of_site, size_of_part
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.device.memory_plan import plan_memory
from enginewright.runtime.device.ranks.member import Ranks, weight_sizes
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import Draw
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.runtime.step.pipeline import Pipeline
from enginewright.stage_plan import RECEIVE, SEND

HUGE_PAGE_BYTES = 2 << 20
KV_DTYPES = tuple(dtype.name for dtype in KV_CACHES.values())  # dtypes that planes of a paged group may have


class CpuExecutor:
    """Executor of an engine's plan on this machine's CPU.

    Args:
        engine: the open engine.
        config: limits of a step; None takes the defaults.
        weights: those of another executor of the same engine, which are used instead of reading them again.
        ranks: the processes that compute the model together, this one among them; None: it is alone.

    Raises:
        NoCodeForMachineError: the CPU lacks the instruction set, or this release lacks a kernel or the KV dtype.
        NotEnoughMemoryError: arena, KV cache, or weights that are read into memory do not fit.
        CorruptEngineError: plan and weights do not match, or the file has changed since it was opened.
    """

    steps_ahead = 0

    def __init__(
        self,
        engine: Engine,
        config: RuntimeConfig | None = None,
        weights: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
        ranks: Ranks | None = None,
    ) -> None:
        config = config or RuntimeConfig()
        self.engine = engine
        sites = engine.adapter_sites.sites if config.enable_lora else ()
        self.plan = model_plan(engine, config)
        self.max_top_logprobs = self.plan.vocab_size
        if ranks is None:
            self.memory_plan = plan_memory(self.plan, config, engine.missing_weight_bytes(weights))
        else:
            self.memory_plan = ranks.memory_plan
            self.plan = ranks.layout.plan(self.plan, ranks.rank, weight_sizes(engine))
        self.ranks = ranks
        self.isa = choose_isa(config.isa or env.cpu_isa())
        self.threads = config.threads or env.num_threads() or num_cores()
        _check_dtypes(engine)
        self._mmap = config.mmap
        self.weights = dict(weights)  # by name, page-aligned; only of use without mmap
        self._check_weights()
        self._offsets, arena_bytes = self.plan.arena_offsets(self.memory_plan.limits)
        self._inputs = [entry.name for entry in self.plan.inputs]
        dims = self.plan.dims
        inputs = [(one.name, one.rows.by_position(dims), one.columns.by_position(dims)) for one in self.plan.inputs]
        try:
            self.pools = [
                _places(group, count)
                for group, count in zip(self.plan.caches, self.memory_plan.num_blocks, strict=True)
            ]
            self.place_memory = [HostPlaces(pool) for pool in self.pools]
            self._sites, self._parts = sites, _adapter_parts(self.plan.calls)
            self._adapters = self._open_adapters(config) if sites else None
            self._executor = _cpu.Executor(self.isa, self.threads, self.memory_plan.limits.counts, inputs, arena_bytes)
            for call in self.plan.calls:
                self._add(call)
            self._logits = self._buffer(self.plan.result)
            hidden, before = self.plan.outputs.get(HIDDEN), self.plan.given.get(HIDDEN_BEFORE)
            self._hidden = None if hidden is None else self._buffer(hidden)
            self._hidden_before = None if before is None else self._buffer(before)
        except KeyError as error:
            raise NoCodeForMachineError(
                f"{engine.file.path} calls a kernel that this release does not have",
                str(error.args[0]),
                "Run it with the release that built it, or build it again.",
            ) from error
        except ValueError as error:
            raise CorruptEngineError(f"{engine.file.path} cannot run", str(error), "Build it again.") from error
        except MemoryError as error:
            arena, kv = (format_bytes(size) for size in (arena_bytes, self.memory_plan.kv_bytes))
            raise NotEnoughMemoryError(
                f"{engine.file.path} cannot run within these limits",
                f"arena {arena}, KV cache {kv}",
                "Use smaller --max-num-batched-tokens, --max-num-seqs, --max-model-len or --kv-cache-memory.",
            ) from error
        engine.file.check_unchanged()  # otherwise the weights that were read may not match the plan

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step.

        Returns:
            Views of memory that the next step overwrites.

        Raises:
            CorruptEngineError: the mapped file has changed, so results may come from other weights.
        """
        self._executor.run(self._prepare(inputs), inputs.sizes.counts)
        if self.ranks is not None:
            self.ranks.check()
        self._check_weights()
        hidden = None if self._hidden is None else self._hidden[: inputs.sizes.tokens]
        return StepOutputs(self._logits[: inputs.sizes.logit_rows], hidden)

    def load_adapter(self, slot: int, adapter: AdapterFile) -> None:
        """Loads an adapter into a slot that no step uses.

        Args:
            slot: the slot.
            adapter: the adapter, which fits the engine (`AdapterFile.check_fits`).
        """
        self.load_sites(slot, adapter.sites)

    def load_sites(self, slot: int, sites: Mapping[str, SiteAdapter]) -> None:
        """Loads what an adapter changes into a slot that no step uses; of each site, what the plan has of it.

        Args:
            slot: the slot.
            sites: key of a site → its changes.
        """
        assert self._adapters is not None, "enable_lora is True"
        changes, replaced = [], []
        for part, index in self._parts.items():
            whole = sites.get(self._sites[part.site].key)
            site = None if whole is None else part_of_site(whole, part)
            if site is None:
                continue
            pieces = [(piece.begin, piece.count, piece.rank, piece.first_rank, piece.b) for piece in site.pieces]
            factors = site.rank, site.a, pieces
            changes.append((index, *factors, site.bias, site.gain, site.matrices, site.shared))
            if site.replaced is not None:
                replaced.append((index, site.replaced.count, site.replaced.ids, site.replaced.rows))
        self._adapters.load(slot, changes, replaced)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot that no step uses."""
        assert self._adapters is not None, "enable_lora is True"
        self._adapters.unload(slot)

    @property
    def pipeline(self) -> Pipeline | None:
        """Stages that compute several steps at a time; None: there is one."""
        return None

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Does nothing: only a step ends this executor."""

    def close(self) -> None:
        """Does nothing: the memory is freed with the object."""

    @property
    def draw(self) -> Draw:
        """`_cpu.sample`, with rows divided among this executor's threads."""
        return self._executor.sample

    def profile(self, inputs: StepInputs) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Runs one step and measures its kernels.

        Returns:
            Two arrays with an entry for each kernel call of the plan: its nanoseconds, and its work in bytes and
            operations (struct Work in csrc/cpu/kernel.h).
        """
        profile = self._executor.profile(self._prepare(inputs), inputs.sizes.counts)
        self._check_weights()
        return profile

    def _prepare(self, inputs: StepInputs) -> list[NDArray[np.int32]]:
        """Copies and zeroes places, and writes HIDDEN_BEFORE. Returns the step's arrays in the order of the plan."""
        for pool, copies, new in zip(self.pools, inputs.copies, inputs.new_blocks, strict=True):
            if copies:
                pool.copy(copies)
            if new:
                pool.scrub(new)
        if self._hidden_before is not None:
            self._hidden_before[: inputs.sizes.tokens] = inputs.hidden
        return [inputs.arrays[name] for name in self._inputs]

    def _buffer(self, index: int) -> NDArray[np.float32]:
        """View of all rows of an fp32 buffer in the executor's arena."""
        buffer, rows = self.plan.buffers[index], self.plan.buffers[index].rows.at(self.memory_plan.limits)
        return self._executor.buffer(self._offsets[index], rows, buffer.columns, buffer.stride, buffer.dtype)

    def _open_adapters(self, config: RuntimeConfig) -> _cpu.Adapters:
        limits = self.memory_plan.limits
        return _cpu.Adapters(
            [size_of_part(self._sites[part.site], part) for part in self._parts],
            num_slots(self.engine, config),
            max_site_rank(self._sites, config.max_lora_rank),
            limits.tokens,
            limits.logit_rows,
            max_top(self.plan),
            [index for part, index in self._parts.items() if self._sites[part.site].kind == "table"],
        )

    def _check_weights(self) -> None:
        if self._mmap:
            self.engine.check_mapped_weights()

    def _weight(self, operand: WeightOperand) -> _cpu.OperandSpec:
        data, form = self.engine.weight(operand.name)
        part = part_of_weight(form, operand)
        assert form.dtype is not None and form.layout is not None
        memory = [self._bytes(operand.name, data, begin, end) for begin, end in part.ranges]
        # Only vectors have several ranges, and these are small.
        whole = memory[0] if len(memory) == 1 else np.concatenate([np.frombuffer(one, np.uint8) for one in memory])
        matrices, rows, columns = part.shape
        return _cpu.OperandSpec.weight(whole, form.dtype, form.layout, rows, columns, matrices)

    def _bytes(self, weight: str, data: memoryview, begin: int, end: int) -> memoryview | NDArray[np.uint8]:
        """A range of a weight's bytes, where they are mapped, or read into memory.

        Scales of groups may begin at any multiple of 16 bytes, and kernels read whole cache lines.
        """
        if self._mmap and begin % ALIGN == 0:
            return data[begin:end]
        name = weight if end - begin == len(data) else f"{weight}[{begin}:{end}]"
        if name not in self.weights:
            self.weights[name] = _system_memory(end - begin)
            self.engine.read_weight(weight, begin, self.weights[name])
        return self.weights[name]

    def _add(self, call: KernelCall) -> None:
        operands = {name: self._operand(operand) for name, operand in call.operands.items()}
        if call.kernel not in (ALL_GATHER, SEND, RECEIVE):
            self._executor.add_kernel(call.kernel, operands, call.attributes)
            return
        assert self.ranks is not None, "RankLayout.plan has added it"
        exchanges, attributes = self.ranks.exchanges, call.attributes
        if call.kernel == ALL_GATHER:
            unit, root = int(attributes["unit"]), int(attributes["root"])
            self._executor.add_all_gather(operands["x"], unit, root, exchanges[GATHER], operands.get("starts"))
            return
        purpose = PREVIOUS if call.kernel == RECEIVE else str(attributes.get("to", NEXT))
        (role,) = operands
        operand = call.operands[role]
        assert isinstance(operand, BufferOperand), "buffers are sent"
        # Rank 0 of the channel receives, and rank 1 has all columns, since they are one unit.
        self._executor.add_all_gather(operands[role], operand.columns, ROOT, exchanges[purpose])

    def _operand(self, operand: Operand) -> _cpu.OperandSpec:
        match operand:
            case InputOperand():
                return _cpu.OperandSpec.step(operand.name)
            case WeightOperand():
                return self._weight(operand)
            case BufferOperand():
                buffer: Buffer = self.plan.buffers[operand.index]
                whole = operand.columns == buffer.columns
                return _cpu.OperandSpec.arena(
                    self._offsets[operand.index],
                    buffer.dtype,
                    buffer.rows.by_position(self.plan.dims),
                    operand.columns,
                    buffer.stride,
                    operand.column,
                    buffer.stride - buffer.columns if whole else 0,
                )
            case AdaptersOperand():
                assert self._adapters is not None, "with_adapters has added it"
                return _cpu.OperandSpec.adapters(self._adapters, self._parts[operand])
            case CacheOperand():
                group = cache_of(self.plan.caches, operand)
                places, layer = self.pools[self.plan.caches.index(group)], group.layers.index(operand.layer)
                if isinstance(places, _cpu.StateSlots):
                    return _cpu.OperandSpec.state(places, layer, operand.part)
                return _cpu.OperandSpec.cache(places, layer, operand.part)


def _system_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Allocates page-aligned memory that the system gets back with the array. malloc might keep it."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if num_bytes >= HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as numpy and the KV cache do
    return np.frombuffer(memory, np.uint8, num_bytes)


class HostPlaces:
    """The memory of a cache group's blocks or slots on the host (PlaceMemory).

    Args:
        pool: the C++ object that holds them.
    """

    def __init__(self, pool: _cpu.CacheBlocks | _cpu.StateSlots) -> None:
        self._pool, self._places = pool, pool.places()  # [place, byte]
        self.place_bytes = self._places.shape[1]

    def copy(self, places: Copies) -> None:
        """Copies places, in order."""
        self._pool.copy(places)

    def read(self, place: int) -> Callable[[], bytes]:
        """Copies a place's content now; the returned function gives the copy."""
        content = self._places[place].tobytes()
        return lambda: content

    def write(self, place: int, content: bytes | memoryview) -> None:
        """Replaces a place's content."""
        self._places[place] = np.frombuffer(content, np.uint8)


def _places(group: CacheGroup, count: int) -> _cpu.CacheBlocks | _cpu.StateSlots:
    """Allocates the blocks or slots of a cache group."""
    if not isinstance(group, PagedCache):
        tensors = [(tensor.name, prod(tensor.shape), tensor.dtype) for tensor in group.tensors]
        return _cpu.StateSlots(len(group.layers), count, tensors)
    planes = [(plane.name, plane.heads, plane.dim, plane.dtype) for plane in group.planes]
    return _cpu.CacheBlocks(len(group.layers), count, group.block_size, planes)


def _adapter_parts(calls: Sequence[KernelCall]) -> Mapping[AdaptersOperand, int]:
    """Numbers the adapter sites of a plan, or the parts of them that it has, in the order of its calls."""
    operands = (operand for call in calls for operand in call.operands.values())
    found = dict.fromkeys(operand for operand in operands if isinstance(operand, AdaptersOperand))
    return {operand: index for index, operand in enumerate(found)}


def _check_dtypes(engine: Engine) -> None:
    for dtype in (plane.dtype for group in engine.plan.paged_caches for plane in group.planes):
        if dtype not in KV_DTYPES:
            raise NoCodeForMachineError(
                f"{engine.file.path} keeps its KV cache as {dtype}",
                f"this release has {', '.join(KV_DTYPES)}",
                "Run it with the release that built it, or build it again with another --kv-cache-dtype.",
            )


def choose_isa(wanted: str | None) -> str:
    """Chooses the instruction set to run on: the given one, or for None the best that this CPU has.

    Raises:
        NoCodeForMachineError: this CPU does not have it.
        UsageError: there is no instruction set of that name.
    """
    names = _cpu.isa_names()
    if wanted is None:
        return names[0]
    if wanted in names:
        return wanted
    if wanted in ("amx", "avx512", "avx512-vnni", "avx2-vnni", "avx2", "portable"):
        raise NoCodeForMachineError(f"this CPU has no {wanted}", f"it has {', '.join(names)}")
    raise UsageError(f"{wanted!r} is no instruction set", f"this CPU has {', '.join(names)}")
