"""Inputs and outputs of an executor for one step: numbers and arrays, and no sequence."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.plan import StepSizes
from enginewright.runtime.sampling.sampler import Logits

Arrays = dict[str, NDArray[np.int32]]


class StepInputs(msgspec.Struct, frozen=True):
    """All that an executor sees of one step.

    It holds numbers and arrays only, so that msgspec can carry it to another process.
    """

    sizes: StepSizes  # of this step, by the plan's dims
    # int32 arrays by the names of the plan's inputs (enginewright/plan.py), valid until the next step is planned. A
    # token below 0 stands for one that the step before samples: -1 - n is that of its n-th row of logits.
    arrays: Arrays
    # (from, to), blocks or slots of each cache group, to copy before anything else happens, in this order: one may be
    # copied from, and then to.
    copies: tuple[list[tuple[int, int]], ...]
    # Blocks or slots of each cache group that a sequence holds from this step on. They are zeroed after the copies: a
    # state begins with zeros, and kernels read whole blocks, where the last sequence may have left NaN.
    new_blocks: tuple[list[int], ...]
    hidden: NDArray[np.float32] | None = None  # [tokens, columns], HIDDEN_BEFORE, where the executor's plan is given it


class StepOutputs(msgspec.Struct, frozen=True):
    """Results of a step by the names of the plan's outputs. The next step overwrites them."""

    logits: Logits  # [logit_rows, vocab_size]; of an embedding model the rows of texts that end, in their order
    hidden: Logits | None = None  # HIDDEN, [tokens, columns], of a plan that shows it
