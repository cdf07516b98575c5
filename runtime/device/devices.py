"""Chooses the device that an engine runs on, a GPU or this machine's CPU, and opens its executor."""

import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from enginewright.adapter_file import AdapterFile
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, NoCodeForMachineError, UsageError, shorten
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.device.ranks.executor import RankedExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import Draw
from enginewright.runtime.scheduler.stored import PlaceMemory
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.runtime.step.pipeline import Pipeline
from enginewright.targets import CPU, CUDA, architectures, choose_code, platforms_of

AUTO = "auto"
NO_WEIGHTS: Mapping[str, Any] = MappingProxyType({})

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the steps of an engine's plan, in memory that it has allocated."""

    plan: Plan  # plan that it runs
    memory_plan: MemoryPlan  # sizes of its memory, and limits of a step
    isa: str  # instruction set of the CPU, or architecture of the GPU
    threads: int  # number of CPU threads that compute; 0 on a GPU
    steps_ahead: int  # 1 if a step may be begun before the previous step's tokens are known on the host; otherwise 0
    max_top_logprobs: int  # maximum number of most likely tokens that it reports for a row of logits

    @property
    def place_memory(self) -> Sequence[PlaceMemory]:
        """The memory of each cache group."""
        ...

    def load_adapter(self, slot: int, adapter: AdapterFile) -> None:
        """Loads an adapter, which fits, into a slot that no step uses, of an executor with `enable_lora`."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot that no step uses."""
        ...

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step, or begins it on a GPU: reading the outputs waits for it."""
        ...

    @property
    def pipeline(self) -> Pipeline | None:
        """Stages that compute several steps at a time; None: there is one."""
        ...

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weights in memory of its own, by name, for another executor of the same engine to share."""
        ...

    @property
    def draw(self) -> Draw:
        """Samples tokens from the logits of the last step, in place of `_cpu.sample`."""
        ...

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed`, from another thread, as soon as something outside of a step ends the executor."""
        ...

    def close(self) -> None:
        """Frees memory that Python would not free by itself. No step is running any more."""
        ...


def open_engine(path: str | Path, device: str = AUTO, *, verify: bool = False) -> Engine:
    """Opens an engine file to run it on a device.

    Args:
        path: of the engine file.
        device: `cpu`, `cuda` or `cuda:1`. `auto` is the first GPU if the engine has code for it, and otherwise the CPU.
        verify: True to check the hashes of the weights, too.

    Raises:
        UsageError: there is no device of that name, or the path is not one, or is that of a checkpoint.
        CorruptEngineError, NoCodeForMachineError: as for `Engine.open`.
    """
    if not isinstance(path, str | PathLike) or "\0" in str(path):
        raise UsageError(f"the model is {shorten(path)}", "it must be the path of an engine file")
    check_device(device)
    target = device.partition(":")[0]
    if target == AUTO:
        with EngineFile.open(path, check_sections=False) as file:
            platforms = platforms_of(file.manifest.targets)
            able = architectures(file.manifest.targets)
        target = CUDA if _gpu_runs(able) else CPU
        if target not in platforms:
            raise NoCodeForMachineError(
                f"{path} has code for GPUs alone, {', '.join(f'{CUDA}:{name}' for name in able)}",
                "there is none here that runs it, or no driver, or cuda-bindings is not installed",
                "Install 'enginewright[cuda]' where such a GPU is, or build the engine again with --target cpu.",
            )
    return Engine.open(path, target, verify=verify)


def check_device(device: str) -> None:
    """Raises UsageError if a device's name is not valid. It does not check that this machine has the device."""
    target, _, index = device.partition(":")
    if target not in (AUTO, *_OPENERS) or (index and (target != CUDA or not index.isdecimal())):
        raise UsageError(f"{device!r} is no device", fix="There are auto, cpu, cuda, and cuda:1 for the second GPU.")


def open_executor(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any] = NO_WEIGHTS) -> Executor:
    """Makes the executor of an open engine, on the device that it was opened for.

    Args:
        engine: the open engine.
        config: limits of a step, and the device.
        weights: those of another executor of the same engine on the same device, which must be closed after this one.

    Raises:
        NoCodeForMachineError, NotEnoughMemoryError, CorruptEngineError: it cannot run here.
    """
    return _OPENERS[engine.target](engine, config, weights)


def _open_on_cpu(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any]) -> Executor:
    if config.num_ranks > 1:
        ranked = RankedExecutor(engine, config, weights)
        _warn_of_threads(ranked.threads * (config.num_ranks // config.nnodes))
        return ranked
    executor = CpuExecutor(engine, config, weights)
    _warn_of_threads(executor.threads)
    return executor


def _open_on_gpu(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any]) -> Executor:
    from enginewright.runtime.device.cuda.device import CudaDevice
    from enginewright.runtime.device.cuda.executor import CudaExecutor

    if config.num_ranks > 1:
        return _open_on_gpus(engine, config, weights)
    device = CudaDevice(int(config.device.partition(":")[2] or 0))
    try:
        archive = engine.code(device.capability)
        engine.plan = engine.plan.for_architecture(engine.architecture(device.capability))
        device.code = lambda name: (bytes(archive.cubin(name)), archive.launches[name])
        executor = CudaExecutor(engine, device, config, weights)
        engine.file.check_unchanged()  # the GPU now has all weights, so later changes of the file do not matter
        executor.warm_up()
    except BaseException:
        device.close()  # frees the memory, so that a caller can try again with other limits
        raise
    return executor


def _open_on_gpus(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any]) -> Executor:
    from enginewright.runtime.device.cuda.device import CudaDevice
    from enginewright.runtime.device.cuda.ranked import RankedCudaExecutor, check_gpus

    check_gpus(config, engine)
    device = CudaDevice(int(config.device.partition(":")[2] or 0))
    try:
        archive = engine.code(device.capability)
        device.code = lambda name: (bytes(archive.cubin(name)), archive.launches[name])
        executor = RankedCudaExecutor(engine, device, config, weights)
    except BaseException:
        device.close()  # frees the memory, so that a caller can try again with other limits
        raise
    engine.file.check_unchanged()  # all GPUs have their weights
    return executor


_OPENERS: Mapping[str, Callable[[Engine, RuntimeConfig, Mapping[str, Any]], Executor]] = {
    CPU: _open_on_cpu,
    CUDA: _open_on_gpu,
}


def _warn_of_threads(threads: int) -> None:
    """Logs a warning if more threads compute than there are cores. Without a logging setup it goes to stderr."""
    cores = num_cores()
    if threads > cores:
        logger.warning(
            "%d threads share %d %s: each step waits for all of them, so more threads than cores make it slower. "
            "Use --threads %d (or ENGINEWRIGHT_NUM_THREADS=%d).",
            threads,
            cores,
            "core" if cores == 1 else "cores",
            cores,
            cores,
        )


def _gpu_runs(able: Sequence[str]) -> bool:
    """True if there is a GPU, and the first one runs code for one of these architectures."""
    from enginewright.runtime.device.cuda.device import capability_of, num_gpus

    if not able or num_gpus() == 0:
        return False
    try:
        choose_code(capability_of(0), able)
    except NoCodeForMachineError:
        return False
    return True
