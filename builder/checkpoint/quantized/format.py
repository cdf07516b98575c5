"""What the formats of quantized checkpoints share."""

from abc import ABC, abstractmethod
from collections import Counter

import torch

from enginewright.builder.tensors import Tensors
from enginewright.passes.weights import RowsTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Format(ABC):
    """How the quantized weights of a checkpoint are stored.

    The tensors that are there say what is quantized; lists of modules that are not are only for the producer.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.notes: Counter[str] = Counter()  # what people should know, and of how many weights it is true

    @abstractmethod
    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """The weight [N, K] of a name, read lazily; None of one that is stored as in other checkpoints.

        Raises:
            EngineError: parts of it are missing, or of the wrong shape.
            UnsupportedModelError: it is stored in a variant that is not implemented.
        """

    def experts(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """The weights of all experts [experts, N, K] that are stored together, as rows [experts · N, K]; None where
        they are stored as in other checkpoints. Errors are those of `weight`.
        """
        del name, shape
        return None

    def means_nothing(self, name: str) -> bool:
        """Whether a tensor that nobody asked for may be left over."""
        del name
        return False

    def note(self, text: str) -> None:
        """Something that people should know of a weight."""
        self.notes[text] += 1

    def note_static_activations(self) -> None:
        """Scales that the producer found for activations are not used: ours are per token (docs/design.md)."""
        self.note("activations are scaled by token or not at all; the checkpoint's static scales of them are not used")
