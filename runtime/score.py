"""Teacher forcing: the logits of given texts, at every position or the last."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import UsageError
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.scheduler import Scheduler
from enginewright.runtime.sequence import TokenSequence


def score(
    executor: CpuExecutor, token_ids: Sequence[Sequence[int]], *, last_only: bool = False
) -> list[NDArray[np.float32]]:
    """Logits of texts, computed together: one array [tokens, vocab_size] a text, or [1, vocab_size] with last_only.

    The KV cache is used from its beginning: nothing else may be running on the executor.

    Raises:
        UsageError: a text has no token, or more than fit the longest sequence.
    """
    longest = executor.envelope.max_model_len
    for ids in token_ids:
        if not 0 < len(ids) <= longest:
            raise UsageError(f"a text has {len(ids)} tokens", f"it must have 1 to {longest}")
    texts = [
        TokenSequence(list(ids), num_prompt_tokens=len(ids), max_tokens=len(ids), every_logit=not last_only)
        for ids in token_ids
    ]
    scheduler = Scheduler(executor.plan.kv_groups, executor.envelope)
    for text in texts:
        scheduler.add(text)
    rows: dict[int, list[NDArray[np.float32]]] = {id(text): [] for text in texts}
    while (plan := scheduler.schedule()) is not None:
        logits, first = executor.run(plan), 0
        for part in plan.parts:
            rows[id(part.sequence)].append(logits[first : first + part.num_logit_rows].copy())
            first += part.num_logit_rows
        scheduler.commit(plan, [])
    return [np.concatenate(rows[id(text)]) for text in texts]
