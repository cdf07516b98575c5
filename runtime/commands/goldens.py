"""Goldens: prompts with the builder's logits, which `engine verify` computes again on this machine.

They detect what hashes cannot: a kernel that computes something else here than in the build. Instruction sets round
differently, so values are compared within a tolerance, as log-probabilities of the tokens that were likeliest in the
build.
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
TOP = 16  # number of likeliest tokens kept for each prompt's last position
DECIMALS = 2  # evidence is rounded so that similar machines write the same bytes
# Log-probabilities of the 16 likeliest tokens differ by up to 0.08 between instruction sets on SmolLM2 (`engine verify
# --isa` shows it): roundings to bf16 fall differently. A wrong kernel moves them by whole units.
TOLERANCE = 0.3
# The tolerance of elements of a vector of length 1: those of MiniLM differ by up to 0.002 between instruction sets, and
# a wrong kernel changes most of them by their own size, 0.05 and more.
VECTOR_TOLERANCE, VECTOR_DECIMALS = 0.03, 4
MAX_TOLERANCE = 10.0  # a larger tolerance would test nothing


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, and the output that the engine computed for it in its build."""

    prompt: tuple[int, ...]  # token ids
    # token id and log-probability of the likeliest next tokens, likeliest first; for an embedding model index and value
    # of the largest elements of the vector, scaled to length 1, or the score
    top: tuple[tuple[int, float], ...]


class Goldens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All goldens of an engine."""

    tolerance: float  # maximum difference of a log-probability or an element on another machine
    entries: tuple[Golden, ...]  # prompts with their outputs

    def to_json(self) -> bytes:
        """The goldens as the bytes of their section."""
        return msgspec.json.encode(self, order="sorted")

    def check(self, plan: Plan) -> None:
        """Raises CorruptEngineError if they cannot be replayed on an engine with this plan."""
        if fault := self._fault(plan):
            raise CorruptEngineError("the goldens cannot be replayed", fault, "Build the engine again.")

    def _fault(self, plan: Plan) -> str | None:
        if not 0 <= self.tolerance <= MAX_TOLERANCE:
            return f"their tolerance is {self.tolerance}, not between 0 and {MAX_TOLERANCE:g}"
        if not self.entries:
            return "there are none"
        max_tokens = min(max(PROMPT_TOKENS), plan.max_seq_len)
        for number, golden in enumerate(self.entries):
            if not 0 < len(golden.prompt) <= max_tokens:
                return f"prompt {number} has {len(golden.prompt)} tokens, not 1 to {max_tokens}"
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
        """Reads the section. Raises CorruptEngineError if it is damaged."""
        try:
            return msgspec.json.decode(data, type=Goldens)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the goldens cannot be read", str(error), "Build the engine again.") from error


def replay_config(
    max_seq_len: int, threads: int | None = None, isa: str | None = None, device: str = AUTO
) -> RuntimeConfig:
    """Limits that the prompts need and no more, since the KV cache of a full sequence may not fit the memory.

    Args:
        max_seq_len: the engine's maximum number of tokens of a sequence.
        threads: threads of the CPU executor; None is the default.
        isa: instruction set of the CPU executor; None is the default.
        device: the device to run on.
    """
    max_tokens = max(PROMPT_TOKENS)
    return RuntimeConfig(
        max_model_len=min(max_tokens, max_seq_len),
        max_num_seqs=1,
        max_num_batched_tokens=max_tokens,
        threads=threads,
        isa=isa,
        device=device,
    )


LastLogits = Callable[[Sequence[int]], NDArray[np.float32]]  # prompt → logits of the next token, [vocab_size]


def last_logits_of(executor: Executor) -> LastLogits:
    """A function that computes the logits after a prompt with the executor."""

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
    """The values of an output row that are kept and compared."""
    if plan.generates:
        return _logprobs(row)
    return _vector(row) if "embedding" in plan.outputs else row.astype(np.float64)


def record(last_logits: LastLogits, plan: Plan) -> Goldens:
    """Computes the goldens of an engine, with prompts of fixed pseudo-random tokens that fit the maximum length.

    Args:
        last_logits: computes the logits after a prompt.
        plan: the engine's plan.
    """
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
    """Computes the prompts again.

    Args:
        goldens: goldens that fit the engine (`Goldens.check`).
        last_logits: computes the logits after a prompt.
        plan: the engine's plan.

    Returns:
        For each golden the largest difference of a log-probability or an element, infinite if the engine gives NaN. The
        engine is correct if none exceeds the tolerance.
    """
    deviations = []
    for golden in goldens.entries:
        values = _compared(plan, last_logits(golden.prompt))
        differences = [abs(float(values[token]) - expected) for token, expected in golden.top]
        deviations.append(max(math.inf if math.isnan(difference) else difference for difference in differences))
    return deviations
