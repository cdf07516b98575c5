"""Measures how far the next-token distributions of an engine are from its source's, on the same texts.

It works by blocks of positions: the logits of all would not fit into memory.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright.errors import QualityGateError
from enginewright.runtime.commands.quality import Distance, PositionRange, rounded

BLOCK_ELEMENTS = 1 << 22  # elements of the source's logits that a thread computes at once
PIECE_ELEMENTS = 1 << 18  # elements of these that are compared at once, so that a cache holds them


class ReferenceModel(Protocol):
    """A model that engines are compared with."""

    def logits(self, text: int, begin: int, end: int) -> torch.Tensor:
        """Computes logits, FLOAT [end - begin, vocab_size].

        Args:
            text: index of the text.
            begin: first position.
            end: position after the last one.
        """


@dataclass(frozen=True)
class Positions:
    """Differences between the engine's predictions and the source's at each position of a text of T tokens."""

    kl: torch.Tensor  # DOUBLE [T], nats; not finite if the engine's logits are not
    same: torch.Tensor  # BOOL [T], True if the same token is the most likely
    source_loss: torch.Tensor  # DOUBLE [T - 1], loss of the next token in the source, in nats
    loss: torch.Tensor  # DOUBLE [T - 1], the same in the engine


def compare(
    source: ReferenceModel,
    produced: Iterable[tuple[int, int, NDArray[np.float32]]],
    texts: Sequence[Sequence[int]],
    threads: int = 1,
    done: Callable[[int], None] = lambda positions: None,
) -> list[Positions]:
    """Compares the logits of each text; the result does not depend on the number of threads.

    Args:
        source: the source.
        produced: the engine's logits: index of the text, first position, and [positions, vocab_size].
        texts: token ids.
        threads: number of threads.
        done: called with the number of positions that were just compared.

    Raises:
        QualityGateError: the source's own logits are not finite.
    """
    parts: list[list[Positions]] = [[] for _ in texts]
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for text, begin, logits in produced:
            block = partial(_compare_block, source, text, begin, logits, texts[text])
            step = max(BLOCK_ELEMENTS // logits.shape[1], 1)
            for part in pool.map(block, range(begin, begin + len(logits), step)):
                parts[text].append(part)
                done(len(part.kl))
    return [_joined(part) for part in parts]


def _compare_block(
    source: ReferenceModel, text: int, first: int, logits: NDArray[np.float32], tokens: Sequence[int], begin: int
) -> Positions:
    """Compares a block; `logits` are the engine's, from position `first` on."""
    vocab_size = logits.shape[1]
    actual = torch.from_numpy(logits[begin - first :][: max(BLOCK_ELEMENTS // vocab_size, 1)])
    expected = source.logits(text, begin, begin + len(actual))
    following, step = tokens[begin + 1 :], max(PIECE_ELEMENTS // vocab_size, 1)
    pieces = range(0, len(actual), step)
    return _joined([compare_rows(expected[i : i + step], actual[i : i + step], following[i:]) for i in pieces])


def compare_rows(expected: torch.Tensor, actual: torch.Tensor, following: Sequence[int]) -> Positions:
    """Compares logits of some positions, FLOAT [T, vocab_size]; everything but sums is in fp32.

    Args:
        expected: logits of the source.
        actual: logits of the engine.
        following: the next token of each position, and more; one fewer at the end of the text.
    """
    (top, expected_token), (other_top, actual_token) = expected.max(1), actual.max(1)
    if not top.isfinite().all():
        raise QualityGateError(
            "the model gives logits that are not finite, before anything is quantized",
            fix="Check the checkpoint. --gate off builds without a comparison.",
        )
    expected, actual = expected - top.unsqueeze(1), actual - other_top.unsqueeze(1)
    weights = expected.exp()
    total, other_total = weights.sum(1, dtype=torch.float64), actual.exp().sum(1, dtype=torch.float64)
    difference = weights.mul_(expected - actual).sum(1, dtype=torch.float64) / total
    next_token = torch.tensor(following[: len(expected)], dtype=torch.int64).unsqueeze(1)
    count = len(next_token)
    return Positions(
        kl=difference - total.log() + other_total.log(),
        same=expected_token == actual_token,
        source_loss=total[:count].log() - expected[:count].gather(1, next_token).squeeze(1).double(),
        loss=other_total[:count].log() - actual[:count].gather(1, next_token).squeeze(1).double(),
    )


def _joined(parts: Sequence[Positions]) -> Positions:
    return Positions(*(torch.cat([vars(part)[field.name] for part in parts]) for field in fields(Positions)))


def distance(found: Sequence[Positions]) -> Distance:
    """Summarizes all positions of some texts."""
    kl, same = torch.cat([one.kl for one in found]), torch.cat([one.same for one in found])
    finite = kl.isfinite()
    count = int(finite.sum())
    error = float(kl[finite].std(correction=0)) / count**0.5 if count else None
    return Distance(
        positions=len(kl),
        broken=len(kl) - count,
        kl=rounded(_mean(kl)),
        kl_standard_error=rounded(error, 2),
        top1=rounded(_mean(same[finite].double()), 4),
        source_perplexity=rounded(_perplexity([one.source_loss for one in found]), 4),
        perplexity=rounded(_perplexity([one.loss for one in found]), 4),
    )


def by_position(found: Sequence[Positions]) -> tuple[PositionRange, ...]:
    """Summarizes ranges of positions, 0, 1, 2-3, 4-7, …: each is as long as all before it."""
    longest, ranges = max(len(one.kl) for one in found), []
    begin, end = 0, 1
    while begin < longest:
        kl = _mean(torch.cat([one.kl[begin:end] for one in found]))
        ranges.append(PositionRange(begin, min(end, longest), rounded(kl)))
        begin, end = end, 2 * end
    return tuple(ranges)


def _mean(values: torch.Tensor) -> float | None:
    """Averages the finite values; None if there are none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else None


def _perplexity(losses: Sequence[torch.Tensor]) -> float | None:
    loss = _mean(torch.cat(list(losses)))
    return None if loss is None else float(torch.tensor(loss, dtype=torch.float64).exp())
