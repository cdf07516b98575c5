"""What an engine runs on here: a GPU that its code is for, or this machine's CPU."""

import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from enginewright.engine_file import EngineFile
from enginewright.errors import NoCodeForMachineError, UsageError, shorten
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import Draw
from enginewright.runtime.scheduler.stored import PlaceMemory
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.targets import CPU, CUDA, architectures, choose_code, platforms_of

AUTO = "auto"
NO_WEIGHTS: Mapping[str, Any] = MappingProxyType({})

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """An engine's plan with memory to run in.

    isa: the instruction set of the CPU that it runs on, or the architecture of the GPU. threads: of the CPU.
    steps_ahead: 1 if a step may be run before the tokens of the one before are known, which it then finds by itself.
    max_top_logprobs: likeliest tokens that a row of logits can be asked for. weights: by name, those that are in memory
    of its own, for another executor of the same engine. place_memory: that of each cache group.
    """

    plan: Plan
    memory_plan: MemoryPlan
    isa: str
    threads: int
    steps_ahead: int
    max_top_logprobs: int

    @property
    def place_memory(self) -> Sequence[PlaceMemory]: ...
    def run(self, inputs: StepInputs) -> StepOutputs: ...

    @property
    def weights(self) -> Mapping[str, Any]: ...
    @property
    def draw(self) -> Draw: ...
    def close(self) -> None:
        """Give memory back that would not go by itself; nothing runs any more."""
        ...


def open_engine(path: str | Path, device: str = AUTO, *, verify: bool = False) -> Engine:
    """Open an engine to be run on a device.

    Args:
        device: `cpu`, `cuda` or `cuda:1`; `auto` is the first GPU if the engine has code for GPUs and there is one.
        verify: hash the weights, too.

    Raises:
        UsageError: there is no such device, or the path is none, or names a checkpoint.
        CorruptEngineError, NoCodeForMachineError: as `Engine.open`.
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
    """Raises UsageError if there is no device of that name; whether this machine has it is seen later."""
    target, _, index = device.partition(":")
    if target not in (AUTO, *_OPENERS) or (index and (target != CUDA or not index.isdecimal())):
        raise UsageError(f"{device!r} is no device", fix="There are auto, cpu, cuda, and cuda:1 for the second GPU.")


def open_executor(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any] = NO_WEIGHTS) -> Executor:
    """An open engine with memory to run in, on the device that it was opened for.

    Args:
        weights: of another executor of the same engine on the same device, which is closed later than this one.

    Raises:
        NoCodeForMachineError, NotEnoughMemoryError, CorruptEngineError: it cannot run here.
    """
    return _OPENERS[engine.target](engine, config, weights)


def _open_on_cpu(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any]) -> Executor:
    executor = CpuExecutor(engine, config, weights)
    _warn_of_threads(executor.threads)
    return executor


def _open_on_gpu(engine: Engine, config: RuntimeConfig, weights: Mapping[str, Any]) -> Executor:
    from enginewright.runtime.device.cuda.device import CudaDevice
    from enginewright.runtime.device.cuda.executor import CudaExecutor

    device = CudaDevice(int(config.device.partition(":")[2] or 0))
    try:
        archive = engine.code(device.capability)
        engine.plan = engine.plan.for_code(engine.architecture(device.capability))
        device.code = lambda name: (bytes(archive.cubin(name)), archive.launches[name])
        executor = CudaExecutor(engine, device, config, weights)
        engine.file.check_unchanged()  # or the GPU has not what was opened; from here on it has it all
        executor.warm_up()
    except BaseException:
        device.close()  # whoever asks again, with other limits, finds the memory free
        raise
    return executor


_OPENERS: Mapping[str, Callable[[Engine, RuntimeConfig, Mapping[str, Any]], Executor]] = {
    CPU: _open_on_cpu,
    CUDA: _open_on_gpu,
}


def _warn_of_threads(threads: int) -> None:
    """Log a warning where more threads compute than there are cores; without logging set up it goes to stderr."""
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
    """Whether there is a GPU, and the first one runs code for one of these architectures."""
    from enginewright.runtime.device.cuda.device import capability_of, num_gpus

    if not able or num_gpus() == 0:
        return False
    try:
        choose_code(capability_of(0), able)
    except NoCodeForMachineError:
        return False
    return True
