"""Teacher forcing: computes the logits of given texts, at every position or only the last."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterFile
from enginewright.errors import UsageError
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.scheduler.adapters import AdapterSlots
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.sequence import TokenSequence


def forced(
    executor: Executor,
    token_ids: Sequence[Sequence[int]],
    *,
    last_only: bool = False,
    adapter: AdapterFile | None = None,
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Computes logits of texts, step by step.

    The KV cache is used from its start, so nothing else may run on the executor.

    Args:
        executor: the executor.
        token_ids: the texts.
        last_only: whether to compute only the logits of each text's last position.
        adapter: adapter of all texts, of an executor with `enable_lora`; None: the engine's own weights.

    Yields:
        Index of a text, first position, and logits [positions, vocab_size], a view that the next step overwrites.

    Raises:
        UsageError: a text has no tokens, or more than a sequence may have.
    """
    max_tokens = executor.memory_plan.max_model_len
    for ids in token_ids:
        if not 0 < len(ids) <= max_tokens:
            raise UsageError(f"a text has {len(ids)} tokens", f"it must have 1 to {max_tokens}")
    texts = [
        TokenSequence(
            list(ids),
            num_prompt_tokens=len(ids),
            max_tokens=len(ids),
            scores_prompt=not last_only,
            adapter=adapter,
        )
        for ids in token_ids
    ]
    slots = None
    if adapter is not None:
        slots = AdapterSlots(1, executor.load_adapter, executor.unload_adapter)
    scheduler = Scheduler(
        executor.plan.caches,
        executor.memory_plan.limits,
        executor.memory_plan.num_blocks,
        whole_texts=executor.plan.whole_texts,
        adapters=slots,
    )
    for text in texts:
        scheduler.add(text)
    index = {id(text): number for number, text in enumerate(texts)}
    while (plan := scheduler.schedule()) is not None:
        logits, row = np.asarray(executor.run(plan.inputs).logits), 0
        for part in plan.scheduled:
            if count := part.num_logit_rows:
                yield index[id(part.sequence)], part.end - count, logits[row : row + count]
            row += count
        scheduler.commit(plan, [])


def score(
    executor: Executor, token_ids: Sequence[Sequence[int]], *, last_only: bool = False
) -> list[NDArray[np.float32]]:
    """Computes all logits of texts.

    Args:
        executor: the executor.
        token_ids: the texts.
        last_only: whether to compute only the logits of each text's last position.

    Returns:
        One array [tokens, vocab_size] per text, or [1, vocab_size] with last_only.
    """
    rows: list[list[NDArray[np.float32]]] = [[] for _ in token_ids]
    for text, _, logits in forced(executor, token_ids, last_only=last_only):
        rows[text].append(logits.copy())
    return [np.concatenate(parts) for parts in rows]
