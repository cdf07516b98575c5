"""Goldens: prompts with the logits that the builder saw, replayed on the machine at hand by `engine verify`.

They catch what hashes cannot: a kernel that computes something else here than it did there. Instruction sets
round differently, so values are compared within a tolerance, as log-probabilities of the tokens that were
likeliest then.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.errors import CorruptEngineError
from enginewright.plan import Plan
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.devices import AUTO, Executor

GOLDENS = "goldens"  # the section of the engine file
PROMPT_TOKENS = (1, 7, 40)  # one token; a partial KV block; more than one KV block
TOP = 16  # tokens kept of each prompt's last position
DECIMALS = 2  # what is written is evidence, rounded so that machines of one class write the same
# Log-probabilities of the 16 likeliest tokens differ by up to 0.08 between instruction sets on SmolLM2 (`engine verify
# --isa` shows it): roundings to bf16 fall differently. A wrong kernel moves them by whole units.
TOLERANCE = 0.3
# The same of a vector of length 1: a number of MiniLM's differs by up to 0.002 between instruction sets, and a wrong
# kernel moves most of them by what they are, 0.05 and more.
VECTOR_TOLERANCE, VECTOR_DECIMALS = 0.03, 4
MOST_TOLERANCE = 10.0  # beyond it, nothing would be tested


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, and what the engine computed for it where it was built."""

    prompt: tuple[int, ...]  # token ids
    # Token id and log-probability of the likeliest next tokens, in order; of an embedding model place and value of the
    # largest numbers of the vector, which has length 1 there, or the score.
    top: tuple[tuple[int, float], ...]


class Goldens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All goldens of an engine."""

    tolerance: float  # how far a log-probability may be off on another machine
    entries: tuple[Golden, ...]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    def check(self, plan: Plan) -> None:
        """Raises CorruptEngineError where they cannot be replayed on an engine of this plan."""
        if fault := self._fault(plan):
            raise CorruptEngineError("the goldens cannot be replayed", fault, "Build the engine again.")

    def _fault(self, plan: Plan) -> str | None:
        if not 0 <= self.tolerance <= MOST_TOLERANCE:
            return f"their tolerance is {self.tolerance}, not between 0 and {MOST_TOLERANCE:g}"
        if not self.entries:
            return "there are none"
        longest = min(max(PROMPT_TOKENS), plan.max_seq_len)
        for number, golden in enumerate(self.entries):
            if not 0 < len(golden.prompt) <= longest:
                return f"prompt {number} has {len(golden.prompt)} tokens, not 1 to {longest}"
            if not golden.top:
                return f"prompt {number} has no log-probabilities"
            columns = plan.buffers[plan.result].columns
            for tokens, size in ((golden.prompt, plan.vocab_size), ((token for token, _ in golden.top), columns)):
                for token in tokens:
                    if not 0 <= token < size:
                        return f"prompt {number} has token {token}, and the model has {size}"
        return None

    @staticmethod
    def from_json(data: bytes) -> "Goldens":
        try:
            return msgspec.json.decode(data, type=Goldens)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the goldens cannot be read", str(error), "Build the engine again.") from error


def replay_config(
    max_seq_len: int, threads: int | None = None, isa: str | None = None, device: str = AUTO
) -> RuntimeConfig:
    """Limits that the prompts need and no more: the KV cache of an engine's longest sequence may not fit the memory.

    max_seq_len: the engine's.
    """
    longest = max(PROMPT_TOKENS)
    return RuntimeConfig(
        max_model_len=min(longest, max_seq_len),
        max_num_seqs=1,
        max_num_batched_tokens=longest,
        threads=threads,
        isa=isa,
        device=device,
    )


LastLogits = Callable[[Sequence[int]], NDArray[np.float32]]  # of the token after a prompt, [vocab_size]


def last_logits_of(executor: Executor) -> LastLogits:
    """As the executor computes them."""

    def last_logits(prompt: Sequence[int]) -> NDArray[np.float32]:
        (logits,) = score(executor, [prompt], last_only=True)
        last: NDArray[np.float32] = logits[-1]
        return last

    return last_logits


def _logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    shifted: NDArray[np.float64] = exact - exact.max()
    logprobs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def _vector(row: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = row.astype(np.float64)
    vector: NDArray[np.float64] = exact / max(float(np.linalg.norm(exact)), 1e-12)
    return vector


def _compared(plan: Plan, row: NDArray[np.float32]) -> NDArray[np.float64]:
    """What is kept of a row of the plan's output, and compared."""
    if plan.generates:
        return _logprobs(row)
    return _vector(row) if "embedding" in plan.outputs else row.astype(np.float64)


def record(last_logits: LastLogits, plan: Plan) -> Goldens:
    """Run prompts of fixed pseudo-random tokens, as far as they fit the longest sequence, and keep what came out."""
    entries = []
    embeds = "embedding" in plan.outputs
    tolerance, decimals = (VECTOR_TOLERANCE, VECTOR_DECIMALS) if embeds else (TOLERANCE, DECIMALS)
    for count in (count for count in PROMPT_TOKENS if count <= plan.max_seq_len):
        prompt = tuple((index * 7919 + 10) % plan.vocab_size for index in range(1, count + 1))
        values = _compared(plan, last_logits(prompt))
        top = np.argsort(-values, kind="stable")[:TOP]
        entries.append(Golden(prompt, tuple((int(token), round(float(values[token]), decimals)) for token in top)))
    return Goldens(tolerance, tuple(entries))


def replay(goldens: Goldens, last_logits: LastLogits, plan: Plan) -> list[float]:
    """The largest difference in log-probability, or in a vector's number, a golden; an engine is right where none is
    above the tolerance. It is infinite where the engine gives no number.

    goldens: that fit the engine (`Goldens.check`).
    """
    deviations = []
    for golden in goldens.entries:
        values = _compared(plan, last_logits(golden.prompt))
        differences = [abs(float(values[token]) - expected) for token, expected in golden.top]
        deviations.append(max(math.inf if math.isnan(difference) else difference for difference in differences))
    return deviations
