"""Runs recurrences in chunks, in Triton's interpreter and the emulator, in a process of its own:
`python -m tests.helpers.triton_recurrence_run few` in the environment TRITON_INTERPRET=1 prints, as JSON lines, how
far each problem's results and states are from float64, and from those of the kernel that takes token by token, which
batch-invariant engines have; and whether the first sequence has the same bits alone and cut.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginewright.plan import Linear, linear, step_sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from tests.cpu.test_recurrence import random_of
from tests.emulator.interpreted import round_products
from tests.helpers.cuda_call import CudaCall, Operand, empty, strided, vector
from tests.plugins.test_plugins_values import gated_delta, selective_state

SM = "sm_90a"  # as CudaCall has it
GAP = 8  # f32 after a slot's own, which belong to other layers
TOKENS = linear(tokens=1)


@dataclass(frozen=True)
class Problem:
    """Arguments for one step.

    Args:
        delta: the gated delta rule, and not Mamba-2.
        k, v: of a head.
        counts, firsts: of each sequence, its tokens in the step, and its positions before.
        cuts: positions, multiples of 64, where the first sequence's tokens are cut.
        alike: all keys of a sequence are nearly the same, and written at full strength; some tokens forget all.
    """

    delta: bool
    heads: int
    key_heads: int
    k: int
    v: int
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    alike: bool = False


FEW = [
    Problem(True, 1, 1, 10, 5, (66, 1, 63), (62, 130, 0), cuts=(64,), alike=True),
    Problem(False, 2, 1, 10, 5, (66, 1, 63), (62, 130, 0), cuts=(64,), alike=True),
]
MANY = [
    Problem(True, 4, 2, 10, 5, (200, 1, 63, 64, 65, 2), (17, 130, 0, 64, 120, 63), cuts=(64, 192)),
    Problem(True, 1, 1, 24, 33, (3, 70), (63, 5), alike=True),
    Problem(True, 1, 1, 128, 64, (129,), (64,), cuts=(128,)),
    Problem(False, 3, 1, 10, 5, (200, 1, 63, 64, 65, 2), (17, 130, 0, 64, 120, 63), cuts=(64, 192)),
    Problem(False, 2, 2, 24, 33, (3, 70), (63, 5), alike=True),
    Problem(False, 1, 1, 2, 3, (2,) * 70 + (1,) * 70 + (2,), tuple(range(141)), cuts=()),
]


class Run:
    def __init__(self, problem: Problem) -> None:
        self.problem, tokens = problem, sum(problem.counts)
        heads, key_heads, k, v = problem.heads, problem.key_heads, problem.k, problem.v
        shapes = {"query": (tokens, key_heads * k), "key": (tokens, key_heads * k), "value": (tokens, heads * v)}
        more = {"beta": (tokens, heads)} if problem.delta else {}
        self.rows = random_of({**shapes, "decay": (tokens, heads), **more})
        self.rows["decay"][:2] = [[50.0] * heads, [-50.0] * heads]
        if problem.alike:
            self.rows["key"] = self.rows["key"][:1] + 0.01 * self.rows["key"]
            self.rows["decay"] = np.where(np.arange(tokens)[:, None] % 29 == 11, 50.0, -5.0 + 0 * self.rows["decay"])
            if problem.delta:
                self.rows["beta"] += 20.0
        names = ("log_a", "dt_bias") if problem.delta else ("log_a", "dt_bias", "skip")
        self.given = random_of(dict.fromkeys(names, (heads,)), 1)
        self.slots = np.arange(len(problem.counts))[::-1] + 1
        self.states = random_of({"state": (len(self.slots) + 2, heads, k, v)}, 2)["state"]
        self.attributes = {"heads": heads, "key_heads": key_heads}
        self.attributes |= {"scale": k**-0.5, "epsilon": 1e-6} if problem.delta else {"dt_min": 0.01}

    def step(
        self,
        counts: Sequence[int],
        firsts: Sequence[int],
        slots: Sequence[int],
        rows: Mapping[str, np.ndarray],
        batch_invariant: bool = False,
    ) -> np.ndarray:
        """Runs a step; gives the tokens' results, [tokens, width], and changes the states in self.memory."""
        problem, tokens = self.problem, sum(counts)
        width, elements = problem.heads * problem.v, problem.heads * problem.k * problem.v
        state = Matrix("f32", Linear(), elements, elements, elements, block_stride=4 * (elements + GAP))
        operands = {
            **{name: strided("f32", TOKENS, array, array.shape[1] + 7) for name, array in rows.items()},
            **{name: vector("f32", array) for name, array in self.given.items()},
            "state": Operand(self.memory, state),
            "query_start": vector("i32", np.cumsum([0, *counts])),
            "kv_len": vector("i32", np.add(firsts, counts)),
            "slots": vector("i32", np.array(slots)),
            "out": empty("f32", TOKENS, tokens, width, width + 3),
        }
        binding = PLUGINS["GatedDelta" if problem.delta else "SelectiveState"].kernels["cuda"]
        assert isinstance(binding, CudaKernel) and binding.scratch is not None
        matrices = {role: replace(one.matrix, column=1) for role, one in operands.items()}  # so nothing is aligned
        scratch = binding.scratch(Call(matrices, self.attributes, (SM,), batch_invariant))
        assert (scratch is None) == batch_invariant
        if scratch is not None:
            role, _, columns = scratch
            operands[role] = empty("f32", TOKENS, tokens, columns, columns + 5)
            matrices[role] = replace(operands[role].matrix, column=1)
        sizes = step_sizes(tokens=tokens, sequences=len(counts), logit_rows=1)
        CudaCall(binding, matrices, batch_invariant=batch_invariant, **self.attributes).run(operands, sizes)
        out = operands["out"].values
        assert np.isnan(out[tokens:]).all() and np.isnan(out[:, width:]).all(), "it writes where it should not"
        return out[:tokens, :width]

    def result(self) -> dict[str, float | bool]:
        problem = self.problem
        doubles = {name: array.astype(np.float64) for name, array in (self.rows | self.given).items()}
        tables = {"state": self.states.astype(np.float64), "query_start": np.cumsum([0, *problem.counts])}
        reference = gated_delta if problem.delta else selective_state
        new, expected = reference({**doubles, **tables, "slots": self.slots}, self.attributes)
        self.begin()
        out = self.step(problem.counts, problem.firsts, self.slots, self.rows)
        found = self.memory[self.slots, :-GAP].reshape(len(self.slots), *new.shape[1:])
        others = np.delete(self.memory, self.slots, axis=0), self.memory[:, -GAP:]
        assert all(np.isnan(other).all() for other in others), "it writes other states"
        first_state = found[0].copy()
        self.begin()
        by_token = self.step(problem.counts, problem.firsts, self.slots, self.rows, batch_invariant=True)
        states = self.memory[self.slots, :-GAP].reshape(found.shape)
        self.begin()
        alone, begin, first = [], 0, problem.firsts[0]
        for end in (*(cut - first for cut in problem.cuts), problem.counts[0]):
            piece = {name: array[begin:end] for name, array in self.rows.items()}
            alone.append(self.step([end - begin], [first + begin], self.slots[:1], piece))
            begin = end
        same_state = np.array_equal(self.memory[self.slots[0], :-GAP], first_state.ravel())
        return {
            "error": float(np.abs(out - expected).max() / np.abs(expected).max()),
            "state": float(np.abs(found - new[self.slots]).max() / np.abs(new[self.slots]).max()),
            "by token": float(np.abs(out - by_token).max() / np.abs(expected).max()),
            "state by token": float(np.abs(found - states).max() / np.abs(new[self.slots]).max()),
            "same": same_state and np.array_equal(np.concatenate(alone), out[: problem.counts[0]]),
        }

    def begin(self) -> None:
        """The states before the step, and NaN in what no sequence has."""
        self.memory = np.full((len(self.states), self.states[0].size + GAP), np.nan, np.float32)
        self.memory[self.slots, :-GAP] = self.states[self.slots].reshape(len(self.slots), -1)


if __name__ == "__main__":
    round_products()
    for problem in {"few": FEW, "many": MANY}[sys.argv[1]]:
        print(json.dumps(Run(problem).result()))
