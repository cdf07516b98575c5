"""The base of the formats of quantized checkpoints."""

from abc import ABC, abstractmethod
from collections import Counter

import torch

from enginewright.builder.tensors import Tensors
from enginewright.passes.weights import RowsTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class QuantizedFormat(ABC):
    """The reader of a checkpoint's quantized weights.

    The tensors themselves decide what is quantized; lists of excluded modules are for the producer only.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.notes: Counter[str] = Counter()  # fact that users should know → number of weights

    @abstractmethod
    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns a weight [N, K], read lazily; None if it is stored as in other checkpoints.

        Args:
            name: name of the weight.
            shape: [N, K].

        Raises:
            EngineError: parts of it are missing, or have the wrong shape.
            UnsupportedModelError: it is stored in a variant that is not implemented.
        """

    def experts(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns the weights of all experts [experts, N, K] that are stored together, as rows [experts · N, K].

        Args:
            name: name of the tensor.
            shape: [experts, N, K].

        Returns:
            The weights; None if they are stored as in other checkpoints. Errors are those of `weight`.
        """
        del name, shape
        return None

    def means_nothing(self, name: str) -> bool:
        """Checks if a tensor that was not requested may be left over."""
        del name
        return False

    def note(self, text: str) -> None:
        """Adds a fact about a weight that users should know."""
        self.notes[text] += 1

    def note_static_activations(self) -> None:
        """Notes that the producer's scales of activations are not used: ours are per token (docs/design.md)."""
        self.note("activations are scaled by token or not at all; the checkpoint's static scales of them are not used")
