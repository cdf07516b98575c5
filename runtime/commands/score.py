"""Teacher forcing: the logits of given texts, at every position or the last."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import UsageError
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.sequence import TokenSequence


def forced(
    executor: Executor, token_ids: Sequence[Sequence[int]], *, last_only: bool = False
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Logits of texts as they are computed: which text, at which position they begin, and [positions, vocab_size].

    They are a view that the next step overwrites. The KV cache is used from its beginning: nothing else may be running
    on the executor.

    Raises:
        UsageError: a text has no token, or more than fit the longest sequence.
    """
    longest = executor.memory_plan.max_model_len
    for ids in token_ids:
        if not 0 < len(ids) <= longest:
            raise UsageError(f"a text has {len(ids)} tokens", f"it must have 1 to {longest}")
    texts = [
        TokenSequence(list(ids), num_prompt_tokens=len(ids), max_tokens=len(ids), every_logit=not last_only)
        for ids in token_ids
    ]
    whole = executor.plan.whole_texts
    scheduler = Scheduler(
        executor.plan.caches, executor.memory_plan.limits, executor.memory_plan.num_blocks, whole_texts=whole
    )
    for text in texts:
        scheduler.add(text)
    index = {id(text): number for number, text in enumerate(texts)}
    while (plan := scheduler.schedule()) is not None:
        logits, row = np.asarray(executor.run(plan).logits), 0
        for part in plan.parts:
            if count := part.num_logit_rows:
                yield index[id(part.sequence)], part.end - count, logits[row : row + count]
            row += count
        scheduler.commit(plan, [])


def score(
    executor: Executor, token_ids: Sequence[Sequence[int]], *, last_only: bool = False
) -> list[NDArray[np.float32]]:
    """All of these logits: one array [tokens, vocab_size] a text, or [1, vocab_size] with last_only."""
    rows: list[list[NDArray[np.float32]]] = [[] for _ in token_ids]
    for text, _, logits in forced(executor, token_ids, last_only=last_only):
        rows[text].append(logits.copy())
    return [np.concatenate(parts) for parts in rows]
