"""The executor of an engine whose model several processes compute together: rank 0, and the others in its group."""

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import on_cpus
from enginewright.runtime.device.ranks.group import RankGroup
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import Step
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs, StepOutputs


class RankedExecutor(CpuExecutor):
    """Rank 0, which has the logits, and starts and ends the other ranks.

    Args:
        engine: the open engine.
        config: limits; `tensor_parallel_size` is the number of ranks.
        weights: as for CpuExecutor.

    Raises:
        UsageError: the config asks for something that ranks do not do yet.
        EngineError: as for CpuExecutor, or a rank cannot open its part of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        config: RuntimeConfig,
        weights: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
    ) -> None:
        check_options(config)
        self._group = RankGroup(engine, config)
        # Ends the other ranks also if the engine is never closed, such as one that could not be opened after this.
        self._close = weakref.finalize(self, self._group.close)
        try:
            with on_cpus(self._group.cpus):
                super().__init__(engine, self._group.config, weights, self._group.ranks)
            self._group.wait_until_ready()
        except BaseException:
            self._close()
            raise

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Runs one step on all ranks.

        Returns:
            Views of memory that the next step overwrites.

        Raises:
            RankLostError: a rank has ended, or does not answer.
            CorruptEngineError: the mapped file has changed, so results may come from other weights.
        """
        self._group.send(Step.of(inputs, self._inputs))
        try:
            return super().run(inputs)
        except RankLostError as error:
            raise self._group.reason(error) from error

    def profile(self, inputs: StepInputs) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Runs one step on all ranks and measures the kernels of this one, as `CpuExecutor.profile`."""
        self._group.send(Step.of(inputs, self._inputs))
        profile = super().profile(inputs)
        try:
            self._group.ranks.check()
        except RankLostError as error:
            raise self._group.reason(error) from error
        return profile

    def watch(self, failed: Callable[[EngineError], None]) -> None:
        """Calls `failed` from another thread if a rank ends."""
        self._group.on_failure(failed)

    def close(self) -> None:
        """Ends the other ranks. A second call does nothing."""
        self._close()


def check_options(config: RuntimeConfig) -> None:
    """Refuses what ranks do not do yet.

    Raises:
        UsageError: the config asks for something of that.
    """
    wanted = {
        "adapters (--lora-modules, --lora-dir, --lora)": config.enable_lora,
        "--kv-cache-disk": config.kv_cache_disk is not None,
        "--kv-cache-remote or --kv-cache-share": config.shares_kv_cache,
        "--kv-role": config.kv_role is not None,
    }
    for option, is_wanted in wanted.items():
        if is_wanted:
            raise UsageError(
                f"--tensor-parallel-size does not work with {option} yet",
                "each rank has a part of the KV cache, and of what adapters change",
                "Leave one of them out.",
            )
