"""The CPU's executor with a GPU's order of steps: a step may begin before the tokens of the last one are known."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import Entries, Fields
from enginewright.runtime.sampling.token_mask import Mask
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from tests.helpers.sampling_reference import with_newest


class LateExecutor(CpuExecutor):
    steps_ahead = 1

    def __init__(self, engine: Engine, config: RuntimeConfig | None = None, *weights: Any) -> None:
        super().__init__(engine, config, *weights)
        # Tokens that the last step sampled, and for each row of logits of this step its newest token.
        self._sampled = self._newest = np.zeros(0, np.int32)
        self.num_late = 0  # tokens that were not known when their step was planned

    def run(self, inputs: StepInputs) -> StepOutputs:
        tokens = inputs.arrays["tokens"].copy()
        late = tokens < 0
        tokens[late] = self._sampled[-1 - tokens[late]]
        self.num_late += int(late.sum())
        self._newest = tokens[inputs.arrays["logit_rows"]]
        return super().run(msgspec.structs.replace(inputs, arrays=inputs.arrays | {"tokens": tokens}))

    @property
    def draw(self):  # type: ignore[no-untyped-def, override]
        return self._draw

    def _draw(
        self, logits: NDArray[np.float32], rows: Entries, history: Entries, biases: Entries, allowed: Mask | None
    ) -> list[Fields]:
        rows, history = with_newest(rows, history, self._newest.tolist())
        fields = super().draw(logits, rows, history, biases, allowed)
        self._sampled = np.array([token for token, *_ in fields], np.int32)
        return list(fields)
