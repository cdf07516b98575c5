"""Executors that compute several steps at a time, each in another stage of the model's layers."""

from typing import Protocol

from enginewright.runtime.step.inputs import StepInputs, StepOutputs


class Pipeline(Protocol):
    """The stages of an executor. Steps end in the order in which they begin."""

    num_stages: int  # number of stages, and the maximum number of steps under way

    def begin(self, inputs: StepInputs) -> None:
        """Computes the first stage of a step. No sequence may be in two steps that give it tokens."""
        ...

    def collect(self) -> StepOutputs:
        """Waits for the outputs of the oldest step under way, which the next call overwrites."""
        ...
