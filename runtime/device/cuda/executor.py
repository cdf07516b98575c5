"""Runs plans on a GPU: the launches of an engine in order, with memory at fixed addresses.

All memory is allocated at the start: weights as the file has them, the arena at its maximum size, the KV pools, and the
inputs. So a launch is a function, a grid and constant arguments, and kernels read the sizes of a step from memory.
Steps that only decode are replayed as graphs, one for each number of sequences in BUCKETS. Other steps are launched
kernel by kernel. Steps in which a row has an adapter have launches and graphs of their own, and all others those of an
engine without adapters.

`run` does not wait for a step; only reading its sampled tokens does. The next step may therefore be queued before that.
For this, host buffers that the device reads or writes exist PIPELINE_SLOTS times, and steps take turns using them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterFile
from enginewright.adapter_plan import SLOTS
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.plan import (
    HIDDEN,
    HIDDEN_BEFORE,
    MAX_DIMS,
    AdaptersOperand,
    BufferOperand,
    CacheOperand,
    Extent,
    Input,
    InputOperand,
    KernelCall,
    Launch,
    Plan,
    RecurrentState,
    StepSizes,
    WeightOperand,
    cache_of,
)
from enginewright.rank_plan import ALL_GATHER, EVERY, PACKED, ROOT
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.adapters import adapter_bytes, model_plan, num_slots, served_sites
from enginewright.runtime.device.cuda.adapters import NO_TABLES, DeviceAdapters
from enginewright.runtime.device.cuda.device import Device, Grid, OnGrid
from enginewright.runtime.device.cuda.places import DevicePlaces
from enginewright.runtime.device.cuda.ranks import DeviceRanks, Packed, packed_parts, rank_weight_bytes
from enginewright.runtime.device.cuda.sampling import PIPELINE_SLOTS, SAMPLED_ROW, DeviceSampler, SamplerLimits
from enginewright.runtime.device.cuda.upload import upload_weights, weight_key
from enginewright.runtime.device.memory_plan import MemoryPlan, limits_of, place_bytes, plan_memory
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import MAX_LOGPROBS
from enginewright.runtime.sampling.sampler import Draw, Entries, Fields
from enginewright.runtime.sampling.token_mask import Mask
from enginewright.runtime.step.inputs import Arrays, StepInputs, StepOutputs
from enginewright.runtime.step.pipeline import Pipeline

RESERVED_BYTES = 256 << 20  # bytes of GPU memory left for code, graphs and the driver
FREE_SHARE = 0.9  # share of the GPU memory left by weights and arena that the KV cache gets by default
ALIGN = 256  # alignment of weights and inputs, in bytes
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # sequences of a graph, up to a step's limit


class DeviceRows:
    """A step's logits or hidden states, which stay on the device until the next step. np.asarray copies them here.

    Args:
        read: copies the rows to the host.
    """

    def __init__(self, read: Callable[[], NDArray[np.float32]]) -> None:
        self._read = read

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self._read(), dtype)


@dataclass(frozen=True)
class _Launches:
    """The launches of a step."""

    grids: Sequence[Launch]  # launches with different grids
    launches: Sequence[tuple[int, OnGrid]]  # index of its grid, and what queues it, in order


class CudaExecutor:
    """Executor of an engine's plan on a GPU.

    Args:
        engine: the open engine.
        device: the GPU.
        config: limits of a step; None takes the defaults.
        weights: addresses of the weights of another executor of the same engine on the same GPU, which are not uploaded
            again. That executor must be closed after this one.
        ranks: the GPUs that compute the model together, this one among them, for an engine with the plan of this rank
            (`Engine.for_rank`); None: it is alone.

    Raises:
        NotEnoughMemoryError: weights, arena and KV cache do not fit.
        CorruptEngineError: plan and code do not match.
    """

    steps_ahead = PIPELINE_SLOTS - 1
    pipeline: Pipeline | None = None  # one GPU computes all layers
    max_top_logprobs = MAX_LOGPROBS

    def __init__(
        self,
        engine: Engine,
        device: Device,
        config: RuntimeConfig | None = None,
        weights: Mapping[str, int] = MappingProxyType({}),
        ranks: DeviceRanks | None = None,
    ) -> None:
        config = config or RuntimeConfig()
        self.ranks = ranks
        self.engine, self.plan, self.device = engine, model_plan(engine, config), device
        self.isa, self.threads = device.architecture, 0
        if self.plan.sampling is None:
            raise CorruptEngineError("the plan is damaged", "it does not say how tokens are sampled", "Build it again.")
        reads_tokens = [call for call in self.plan.calls if InputOperand("tokens") in call.operands.values()]
        if reads_tokens and not any("sampled" in one.arguments for call in reads_tokens for one in call.launches):
            raise CorruptEngineError("the plan is damaged", "it does not take up what was sampled", "Build it again.")
        length, limits = limits_of(self.plan, config)
        sampler_limits = SamplerLimits.of(limits.sequences, length, self.plan.vocab_size, len(engine.eos_token_ids))
        self.memory_plan = (
            ranks.memory_plan
            if ranks
            else plan_memory(
                self.plan,
                config,
                engine.missing_weight_bytes(weights),
                free=device.free_bytes - RESERVED_BYTES - sampler_limits.device_bytes,
                share=FREE_SHARE,
                adapter_bytes=adapter_bytes(engine, config),
            )
        )
        self._multiprocessors = device.multiprocessors
        self._inputs = _Inputs(self.plan.inputs, limits, device)
        offsets, arena_bytes = self.plan.arena_offsets(limits)
        arena = device.allocate(arena_bytes)
        self._buffers = [arena + offset for offset in offsets]
        caches = self.plan.caches
        self._states = [index for index, group in enumerate(caches) if isinstance(group, RecurrentState)]
        self.place_memory = [
            DevicePlaces(device, count, place_bytes(group))
            for group, count in zip(caches, self.memory_plan.num_blocks, strict=True)
        ]
        self.weights: Mapping[str, int] = upload_weights(engine, device, ALIGN, weights)
        self._logits = self._buffers[self.plan.result]
        known = device.allocate(4 * limits.tokens)
        places = {"sizes": self._inputs.sizes, "known": known, "logits": self._logits}
        places["logit_rows"] = self._inputs.addresses["logit_rows"]
        self._sampler = DeviceSampler(self.plan.sampling, sampler_limits, places, device)
        self._of_steps = {"sampled": self._sampler.sampled, "known": known}  # tokens from step to step
        self._share_sampled: Callable[[int], None] | None = None  # gives all ranks what rank 0 has sampled
        if ranks is not None:
            rows = {ROOT: Packed(self._sampler.sampled, SAMPLED_ROW.itemsize)}
            self._share_sampled = ranks.carrier.exchange(rows, EVERY)
        self._adapters: DeviceAdapters | None = None
        self._launches = {False: self._launches_of(engine.plan)}  # by whether rows of the step have adapters
        if config.enable_lora:
            sites = served_sites(engine)
            self._adapters = DeviceAdapters(device, self.plan, sites, num_slots(engine, config), config.max_lora_rank)
            self._launches[True] = self._launches_of(self.plan)
        self._buckets = buckets_for(limits.sequences)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        device.synchronize()

    @property
    def draw(self) -> Draw:
        """Samples on the device, from the logits of the last `run`."""
        return self._draw

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Does nothing: only a step ends this executor."""

    def close(self) -> None:
        """Frees the GPU's memory. The caller has waited for all steps."""
        self.device.close()

    def warm_up(self) -> None:
        """Captures the graphs of all buckets, so that no step has to."""
        for adapted in self._launches:
            for count in self._buckets:
                self._graph(count, adapted)

    def load_adapter(self, slot: int, adapter: AdapterFile) -> None:
        """Queues copies of an adapter to a slot that no later step uses before it is loaded.

        Args:
            slot: the slot.
            adapter: the adapter, which fits the engine (`AdapterFile.check_fits`) and the slot (`check_slot`).
        """
        assert self._adapters is not None, "enable_lora is True"
        self._adapters.load(slot, adapter.sites)

    def unload_adapter(self, slot: int) -> None:
        """Does nothing: no step uses the slot until another adapter is loaded into it."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Queues one step. Reading its outputs, or the tokens sampled from its logits, waits for it."""
        self.device.bind()
        sizes = inputs.sizes
        if any(inputs.copies):
            for memory, copies in zip(self.place_memory, inputs.copies, strict=True):
                memory.copy(copies)
        # A state starts with zeros. New blocks need not: attention reads no position that its queries do not see.
        for group in self._states:
            self.place_memory[group].zero(inputs.new_blocks[group])
        adapted, arrays = False, inputs.arrays
        if self._adapters is not None:
            tables = self._adapters.tables(arrays[SLOTS.name], arrays["logit_rows"])
            adapted, arrays = tables is not NO_TABLES, {**arrays, **tables}
        self._inputs.upload(arrays, sizes)
        if inputs.hidden is not None:
            self._write(self.plan.given[HIDDEN_BEFORE], inputs.hidden)
        if self._share_sampled is not None and (inputs.arrays["tokens"] < 0).any():
            self._share_sampled(self.memory_plan.limits.sequences)  # tokens that the host does not know
        bucket = bucket_of(sizes, self._buckets)
        if bucket is not None:
            self._graph(bucket, adapted)()
        else:
            self._launch(sizes, adapted)
        hidden = self.plan.outputs.get(HIDDEN)
        return StepOutputs(
            DeviceRows(lambda: self._read(self.plan.result, sizes.logit_rows)),
            None if hidden is None else DeviceRows(lambda: self._read(hidden, sizes.tokens)),
        )

    def _read(self, index: int, count: int) -> NDArray[np.float32]:
        """Copies the first `count` rows of a buffer to the host: [count, columns]."""
        buffer = self.plan.buffers[index]
        rows = np.empty((count, buffer.stride), np.float32)
        self.device.download(rows.reshape(-1).view(np.uint8), self._buffers[index])
        self.device.synchronize()
        return rows[:, : buffer.columns]

    def _write(self, index: int, values: NDArray[np.float32]) -> None:
        """Fills the first rows of a buffer from the host: [rows, columns]."""
        rows = np.zeros((len(values), self.plan.buffers[index].stride), np.float32)
        rows[:, : values.shape[1]] = values
        self.device.upload(self._buffers[index], rows.reshape(-1).view(np.uint8))
        self.device.synchronize()  # the copy reads `rows` until then

    def _draw(
        self, _: DeviceRows, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None
    ) -> Iterable[Fields]:
        return self._sampler.draw(rows, history, biases, allowed)

    def _graph(self, count: int, adapted: bool) -> Callable[[], None]:
        key = count, adapted
        if key not in self._graphs:
            limits = self.memory_plan.limits
            sizes = StepSizes(limits.dims, (count, count, count, *limits.counts[3:]))
            self._graphs[key] = self.device.capture(lambda: self._launch(sizes, adapted))
        return self._graphs[key]

    def _launch(self, sizes: StepSizes, adapted: bool) -> None:
        whole = self._launches[adapted]
        grids = [self._grid(launch, sizes) for launch in whole.grids]
        for index, run in whole.launches:
            if (grid := grids[index]) is not None:
                run(grid)

    def _launches_of(self, plan: Plan) -> "_Launches":
        """Prepares the launches of all calls. Layers repeat grids, each of which is computed only once a step."""
        grids: dict[Launch, int] = {}
        launches = []
        for call in plan.calls:
            for launch, run in self._runs_of(call):
                shape = msgspec.structs.replace(launch, kernel="", arguments=(), threads=0, shared_bytes=0)
                launches.append((grids.setdefault(shape, len(grids)), run))
        return _Launches(tuple(grids), launches)

    def _runs_of(self, call: KernelCall) -> list[tuple[Launch, OnGrid]]:
        """Lists all that a call queues, in order, each with the launch that its grid follows from."""
        runs = [(launch, self._launcher(call, launch)) for launch in call.launches]
        if call.kernel == ALL_GATHER:  # between the copy of this rank's part and those of the others
            own = sum(launch.arguments[-1].startswith(PACKED) for launch in call.launches)
            runs.insert(own, (self._rows_of(call), self._exchange(call)))
        return runs

    def _rows_of(self, call: KernelCall) -> Launch:
        """A launch whose grid has as many blocks as an exchange has rows."""
        x = call.operands["x"]
        assert isinstance(x, BufferOperand)
        return Launch("", (), (Extent(self.plan.buffers[x.index].rows), Extent(), Extent()), 0)

    def _exchange(self, call: KernelCall) -> OnGrid:
        assert self.ranks is not None, "only plans of ranks have exchanges"
        parts = packed_parts(self.plan, call, self._buffers)
        run = self.ranks.carrier.exchange(parts, int(call.attributes["root"]))
        return lambda grid: run(grid[0])

    def _grid(self, launch: Launch, sizes: StepSizes) -> Grid | None:
        """Grid of a launch in a step of these sizes; None if it does not run."""
        if not launch.runs(sizes):
            return None
        x, y, z = (extent.at(sizes, self._multiprocessors) for extent in launch.grid)
        return (x, y, z) if x * y * z else None

    def _launcher(self, call: KernelCall, launch: Launch) -> OnGrid:
        addresses = [self._inputs.sizes]
        for role in launch.arguments:
            operand = call.operands.get(role)
            if operand is None:
                addresses.append(self._of_steps.get(role, 0))
            elif isinstance(operand, AdaptersOperand):
                delta = call.operands["delta"]
                assert self._adapters is not None and isinstance(delta, BufferOperand), "with_adapters has added them"
                addresses.append(self._adapters.address(delta.index))
            else:
                addresses.append(self._address(operand))
        return self.device.launcher(launch.kernel, launch.threads, launch.shared_bytes, addresses)

    def _address(self, operand: InputOperand | WeightOperand | BufferOperand | CacheOperand) -> int:
        match operand:
            case InputOperand():
                return self._inputs.addresses[operand.name]
            case WeightOperand():
                return self.weights[weight_key(operand)]
            case BufferOperand():
                buffer = self.plan.buffers[operand.index]
                return self._buffers[operand.index] + operand.column * buffer.element_bytes
            case CacheOperand():
                group = cache_of(self.plan.caches, operand)
                memory = self.place_memory[self.plan.caches.index(group)]
                return memory.address + group.offset_bytes(operand.layer, operand.part)


def plan_memory_of_ranks(engine: Engine, device: Device, config: RuntimeConfig, size: int) -> MemoryPlan:
    """Plans the memory of several GPUs, which are taken to be like this one.

    Args:
        engine: the open engine.
        device: the GPU of rank 0, before anything is allocated there.
        config: limits of a step. The size of the KV cache is that of each GPU.
        size: number of ranks.

    Returns:
        The memory plan of rank 0, with no more blocks than each rank has room for.

    Raises:
        UsageError: the engine was not built for so many ranks.
        NotEnoughMemoryError: the part of a rank does not fit.
    """
    length, limits = limits_of(engine.plan, config)
    sampler_limits = SamplerLimits.of(limits.sequences, length, engine.plan.vocab_size, len(engine.eos_token_ids))
    free = device.free_bytes - RESERVED_BYTES - sampler_limits.device_bytes
    each = [engine.for_rank(rank, size) for rank in range(size)]
    plans = [plan_memory(one.plan, config, rank_weight_bytes(one), free=free, share=FREE_SHARE) for one in each]
    fewest = tuple(map(min, zip(*(one.num_blocks for one in plans), strict=True)))
    return replace(plans[0], num_blocks=fewest)


def buckets_for(max_sequences: int) -> tuple[int, ...]:
    """Numbers of sequences for which graphs are captured, if a step has at most `max_sequences` sequences."""
    largest = min(max_sequences, BUCKETS[-1])
    return (*(count for count in BUCKETS if count < largest), largest)


def bucket_of(sizes: StepSizes, buckets: Sequence[int]) -> int | None:
    """Number of sequences of the graph that runs a step.

    Returns None if no graph does: the step does not decode one token of each sequence, or it has too many sequences.
    """
    tokens, sequences, logit_rows = sizes.counts[:3]
    if not tokens == sequences == logit_rows or tokens > buckets[-1]:
        return None
    return buckets[bisect_left(buckets, tokens)]


class _Inputs:
    """GPU memory of a step's sizes and inputs. Sizes and vectors come first, so one copy uploads them; then tables."""

    def __init__(self, inputs: Sequence[Input], limits: StepSizes, device: Device) -> None:
        self._device = device
        vectors = [entry for entry in inputs if entry.columns.at(limits) == entry.columns.constant]
        tables = [entry for entry in inputs if entry not in vectors]
        offset, offsets = 4 * MAX_DIMS, {}
        for entry in (*vectors, *tables):
            offset = -(-offset // ALIGN) * ALIGN
            offsets[entry.name] = offset
            offset += 4 * entry.rows.at(limits) * entry.columns.at(limits)
        hosts = [device.pinned(offset) for _ in range(PIPELINE_SLOTS)]
        self._slots = cycle([(host, host.view(np.int32), device.event()) for host in hosts])
        self.sizes = device.allocate(offset)
        self.addresses = {name: self.sizes + offset for name, offset in offsets.items()}
        self._vectors = {entry.name: offsets[entry.name] // 4 for entry in vectors}
        self._tables = {entry.name: offsets[entry.name] for entry in tables}
        self._last: dict[str, NDArray[np.int32]] = {}  # the tables that are on the device

    def upload(self, arrays: Arrays, sizes: StepSizes) -> None:
        host, words, is_read = next(self._slots)
        self._device.wait(is_read)
        words[: len(sizes.counts)] = sizes.counts
        end = 4 * MAX_DIMS
        for name, at in self._vectors.items():
            values = arrays[name]
            words[at : at + len(values)] = values
            end = 4 * (at + len(values)) if len(values) else end
        for name, start in self._tables.items():
            values = arrays[name]
            if values is not self._last.get(name):  # a changed table is a new array (Packer._gather)
                self._last[name] = values
                end = start + values.nbytes
                host[start:end] = values.reshape(-1).view(np.uint8)
                self._device.upload(self.addresses[name], host[start:end])
        self._device.upload(self.sizes, host[:end])
        self._device.record(is_read)
