"""Inputs and outputs of an executor for one step: numbers and arrays, without references to sequences."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.plan import StepSizes
from enginewright.runtime.sampling.sampler import Logits

Arrays = dict[str, NDArray[np.int32]]


class StepInputs(msgspec.Struct, frozen=True):
    """Everything that an executor knows about one step.

    It holds only numbers and arrays, so that msgspec can send it to another process.
    """

    sizes: StepSizes  # sizes of this step, by the plan's dimensions
    # int32 arrays by the names of the plan's inputs (enginewright/plan.py), valid until the next step is planned. A
    # negative token stands for one that the previous step samples: -1 - n is the token of its row n of logits.
    arrays: Arrays
    # For each cache group, pairs (from, to) of blocks or slots to copy before anything else. The order matters: a place
    # may be copied from, and overwritten by a later copy.
    copies: tuple[list[tuple[int, int]], ...]
    # For each cache group, blocks or slots that a sequence holds from this step on. The CPU zeroes them after the
    # copies: a state starts with zeros, and kernels read whole blocks, in which an earlier sequence may have left NaN.
    # A GPU zeroes states only, since its attention reads no position that its queries do not see.
    new_blocks: tuple[list[int], ...]
    hidden: NDArray[np.float32] | None = None  # [tokens, columns], the plan's input HIDDEN_BEFORE, if it has one


class StepOutputs(msgspec.Struct, frozen=True):
    """Results of a step. The next step overwrites them."""

    logits: Logits  # [logit_rows, vocab_size]; for an embedding model, a row for each text that ends, in order
    hidden: Logits | None = None  # [tokens, columns], the plan's output HIDDEN, if it has one
