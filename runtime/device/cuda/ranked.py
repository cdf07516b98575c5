"""The executors of GPUs of one machine that compute one model together: rank 0, and the others in their processes."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cuda.device import CudaDevice, num_gpus
from enginewright.runtime.device.cuda.executor import CudaExecutor, DeviceRows, plan_memory_of_ranks
from enginewright.runtime.device.cuda.nccl import NcclCarrier, new_group
from enginewright.runtime.device.cuda.ranks import DeviceRanks
from enginewright.runtime.device.cuda.sampling import PIPELINE_SLOTS
from enginewright.runtime.device.ranks.carriers import Carriers
from enginewright.runtime.device.ranks.executor import check_options
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import Failed, Settings, Start, Step
from enginewright.runtime.device.ranks.processes import start_processes
from enginewright.runtime.device.ranks.shares import check_gpu_ranks
from enginewright.runtime.device.ranks.watch import Member, Watch, error_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import Entries, Fields
from enginewright.runtime.sampling.token_mask import Mask
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.targets import CUDA

POLL_S = 0.2  # seconds between two looks if a rank that others wait for is lost


def check_gpus(config: RuntimeConfig, engine: Engine) -> None:
    """Refuses what several GPUs cannot do, before anything is started.

    Raises:
        UsageError: the engine was not built for so many, there are fewer, or they are not all on this machine.
    """
    size, first = config.tensor_parallel_size, _index(config)
    check_options(config)
    check_gpu_ranks(config.rank_layout)
    if config.enable_lora:
        what = "--tensor-parallel-size on GPUs does not work with adapters (--lora-modules, --lora-dir, --lora) yet"
        raise UsageError(what, "their parts of ranks are for CPUs", "Leave one of them out.")
    engine.for_rank(0, size)
    if config.nnodes > 1:
        raise UsageError("--nnodes is for CPUs", "GPUs of several machines do not exchange yet", "Leave it out.")
    there = num_gpus()
    if first + size > there:
        what = f"--tensor-parallel-size {size} needs GPUs {first} to {first + size - 1}"
        raise UsageError(what, f"this process sees {there}", "Use fewer, or another --device.")


class RankedCudaExecutor(CudaExecutor):
    """Rank 0, which has the logits, and starts and ends the processes of the other ranks.

    Args:
        engine: the open engine.
        device: the GPU of rank 0; the other ranks have those after it.
        config: limits; `tensor_parallel_size` is the number of ranks.
        weights: as for CudaExecutor.

    Raises:
        UsageError, EngineError: as for CudaExecutor, or a rank cannot open its part of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        device: CudaDevice,
        config: RuntimeConfig,
        weights: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        size, group = config.tensor_parallel_size, new_group()
        memory_plan = plan_memory_of_ranks(engine, device, config, size)
        settings = Settings(
            engine.manifest.content_hash, config.rank_layout, (), memory_plan, device.architecture, 1, config.mmap
        )
        self._group = _Group(settings, str(engine.file.path), _index(config), group)
        # Ends the other ranks also if the engine is never closed, such as one that could not be opened after this.
        self._close = weakref.finalize(self, self._group.close)
        try:
            carrier = self._group.join(lambda: NcclCarrier(device, group, 0, size))
            ranks = DeviceRanks(carrier, 0, size, memory_plan)
            super().__init__(rank_engine(engine, device, 0, size), device, config, weights, ranks)
            self.warm_up()  # as the others do now: what they capture may connect them first
            self._group.wait_until_ready()
        except BaseException:
            self._close()
            raise

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Queues one step on all ranks. Reading its outputs, or the tokens sampled from its logits, waits for it.

        Raises:
            RankLostError: a rank has ended, or does not answer.
        """
        self._group.send(Step.of(inputs, [entry.name for entry in self.plan.inputs]))
        try:
            return super().run(inputs)
        except EngineError:
            self._group.check()  # an exchange that another rank has left fails here, too
            raise

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed` from another thread if a rank ends."""
        self._group.on_failure(failed)

    def close(self) -> None:
        """Ends the other ranks, and frees the GPU's memory."""
        self._close()
        super().close()

    def _read(self, index: int, count: int) -> NDArray[np.float32]:
        rows = super()._read(index, count)
        self._group.check()
        return rows

    def _draw(
        self, logits: DeviceRows, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None
    ) -> Iterable[Fields]:
        return _Checked(super()._draw(logits, rows, history, biases, allowed), self._group.check)


class RankOnGpu(CudaExecutor):
    """A rank other than rank 0, in its own process. A thread waits for each step, whose outputs nobody reads."""

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed` from a thread if a step fails. Steps are run after this."""
        self._free, self._running = SimpleQueue[Any](), SimpleQueue[Any]()  # events
        for _ in range(PIPELINE_SLOTS):
            self._free.put(self.device.event(sleeps=True))

        def wait() -> None:
            try:
                self.device.bind()
                while True:
                    event = self._running.get()
                    self.device.wait(event)
                    self._free.put(event)
            except EngineError as error:
                failed(error)

        threading.Thread(target=wait, name="wait for steps", daemon=True).start()

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Queues one step, as soon as no more than PIPELINE_SLOTS are queued with it."""
        event = self._free.get()
        outputs = super().run(inputs)
        self.device.record(event)
        self._running.put(event)
        return outputs


def open_rank(start: Start) -> RankOnGpu:
    """Opens the part of a rank other than rank 0, in its own process.

    Args:
        start: the first message to the process, with a GPU.

    Raises:
        EngineError: it cannot be opened.
    """
    settings = start.settings
    assert start.gpu is not None, "the caller has looked"
    device = CudaDevice(start.gpu)
    if device.architecture != settings.isa:
        what = f"rank {start.rank} would compute on {device.name}, {device.architecture}"
        raise UsageError(what, f"rank 0 has {settings.isa}, whose results differ", "Use GPUs of one kind.")
    engine = Engine.open(start.path, CUDA)
    if engine.manifest.content_hash != settings.content_hash:
        raise CorruptEngineError(f"{start.path} is another engine than rank 0 has", "its content hash differs")
    archive = engine.code(device.capability)
    device.code = lambda name: (bytes(archive.cubin(name)), archive.launches[name])
    carrier = NcclCarrier(device, start.group, start.rank, settings.layout.size)
    ranks = DeviceRanks(carrier, start.rank, settings.layout.size, settings.memory_plan)
    limits = settings.memory_plan
    config = RuntimeConfig(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.limits.sequences,
        max_num_batched_tokens=limits.limits.tokens,
        max_logit_rows=limits.limits.logit_rows,
    )
    executor = RankOnGpu(rank_engine(engine, device, start.rank, settings.layout.size), device, config, ranks=ranks)
    executor.warm_up()
    return executor


def rank_engine(engine: Engine, device: CudaDevice, rank: int, size: int) -> Engine:
    """Returns an engine with the plan of a rank, for the architecture of its GPU.

    Args:
        engine: the open engine.
        device: the GPU.
        rank: the rank.
        size: number of ranks.
    """
    own = engine.for_rank(rank, size)
    own.plan = own.plan.for_architecture(engine.architecture(device.capability))
    return own


class _Group:
    """The processes of ranks 1 to N - 1, which are started with the group and ended with it."""

    def __init__(self, settings: Settings, path: str, first_gpu: int, group: bytes) -> None:
        self._tell: Callable[[EngineError], None] | None = None  # what to call when the group fails
        self._carrier: NcclCarrier | None = None
        self._lost: Failed | None = None  # why the group has failed
        processes = start_processes(
            settings, path, range(settings.layout.size), Carriers(()), first_gpu=first_gpu, group=group
        )
        self._watch = Watch(processes, self._check_exchanges, self._fail)

    def join(self, make: Callable[[], NcclCarrier]) -> NcclCarrier:
        """Makes the carrier of rank 0, which waits for the other ranks.

        Raises:
            EngineError: it cannot be made, or another rank is lost, for which it would wait without end.
        """
        made: list[NcclCarrier | BaseException] = []

        def run() -> None:
            try:
                made.append(make())
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=run, name="join ranks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            self.check()
        (result,) = made
        if isinstance(result, BaseException):
            raise result
        self._carrier = result
        return result

    def wait_until_ready(self) -> None:
        """Waits until all ranks have opened the engine."""
        self._watch.wait_until_ready()

    def send(self, message: Step) -> None:
        """Sends a step to all other ranks."""
        self._watch.send(message)

    def check(self) -> None:
        """Raises RankLostError if a rank is lost: what this GPU has computed since then is of no use."""
        if self._lost is not None:
            raise error_of(self._lost)

    def on_failure(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed` once the group fails, from another thread, or now if it has failed."""
        self._tell = failed
        if self._lost is not None:
            failed(error_of(self._lost))

    def close(self) -> None:
        """Ends the processes."""
        self._tell = None
        self._watch.close()  # whose thread asks the carrier, so it comes first
        if self._carrier is not None:
            self._carrier.close()

    def _check_exchanges(self) -> None:
        if self._carrier is not None:
            try:
                self._carrier.check()
            except EngineError as error:
                raise RankLostError(error.what, error.why, "Start it again.") from error

    def _fail(self, member: Member | None, failed: Failed) -> None:
        self._lost = failed
        if self._carrier is not None:
            self._carrier.close()  # this GPU may wait for one that is lost
        tell = self._tell
        if tell is not None:
            tell(error_of(failed))


class _Checked:
    """Sampled tokens, which are of no use if a rank was lost before they could be read."""

    def __init__(self, fields: Iterable[Fields], check: Callable[[], None]) -> None:
        self._fields, self._check = fields, check

    def __iter__(self) -> Iterator[Fields]:
        found = iter(self._fields)  # waits for the step
        self._check()
        return found


def _index(config: RuntimeConfig) -> int:
    """Number of the first GPU."""
    return int(config.device.partition(":")[2] or 0)
