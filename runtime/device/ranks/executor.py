"""The executor of an engine whose model several processes compute together: rank 0, and the others in its group."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterFile
from enginewright.errors import EngineError, UsageError
from enginewright.plan import StepSizes
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import on_cpus
from enginewright.runtime.device.ranks.adapters import messages_of
from enginewright.runtime.device.ranks.group import RankGroup
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import Step, UnloadAdapter
from enginewright.runtime.device.ranks.results import Results
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.runtime.step.pipeline import Pipeline


class RankedExecutor(CpuExecutor):
    """Rank 0, which has the logits, and starts and ends the other ranks.

    Args:
        engine: the open engine.
        config: limits; `rank_layout` says how many ranks there are.
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
            self.num_stages = config.pipeline_parallel_size
            self._begun = deque[StepSizes]()  # sizes of the steps under way in a pipeline, the oldest first
            self._results = Results(engine.plan, self._group.ranks, self.isa) if self.num_stages > 1 else None
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
        if self._results is not None:
            self.begin(inputs)
            return self.collect()
        return self._run(inputs)

    def _run(self, inputs: StepInputs) -> StepOutputs:
        """Lets all ranks run a step, and runs it on this one."""
        self._group.send(Step.of(inputs, self._inputs))
        try:
            return super().run(inputs)
        except RankLostError as error:
            raise self._group.reason(error) from error

    @property
    def pipeline(self) -> Pipeline | None:
        """Stages that compute several steps at a time; None: there is one."""
        return self if self.num_stages > 1 else None

    def begin(self, inputs: StepInputs) -> None:
        """Runs the first stage of a step. As many steps may be under way as there are stages.

        Raises:
            RankLostError, CorruptEngineError: as for `run`.
        """
        self._run(inputs)
        self._begun.append(inputs.sizes)

    def collect(self) -> StepOutputs:
        """Waits for the last stage of the oldest step under way.

        Returns:
            Views of memory that the next call overwrites.

        Raises:
            RankLostError: a rank has ended, or does not answer.
        """
        assert self._results is not None, "there are several stages"
        try:
            return self._results.receive(self._begun.popleft())
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

    def load_adapter(self, slot: int, adapter: AdapterFile) -> None:
        """Loads an adapter on all ranks, as `CpuExecutor.load_adapter`.

        Raises:
            RankLostError: a rank has ended, or cannot load another one.
        """
        for message in messages_of(slot, adapter):
            self._group.send(message)
        super().load_adapter(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot on all ranks, as `CpuExecutor.unload_adapter`.

        Raises:
            RankLostError: a rank has ended.
        """
        self._group.send(UnloadAdapter(slot))
        super().unload_adapter(slot)

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
        "--kv-cache-disk": config.kv_cache_disk is not None,
        "--kv-cache-remote or --kv-cache-share": config.shares_kv_cache,
        "--kv-role": config.kv_role is not None,
    }
    ranks = "--tensor-parallel-size" if config.tensor_parallel_size > 1 else "--pipeline-parallel-size"
    for option, is_wanted in wanted.items():
        if is_wanted:
            raise UsageError(
                f"{ranks} does not work with {option} yet",
                "each rank has a part of the KV cache",
                "Leave one of them out.",
            )
