"""Quality of quantized engines: distance of next-token distributions from the BF16 checkpoint, on held-out text.

The reference is transformers in fp32 on the BF16 weights. KL(reference || other) is a mean over positions, in nats;
top-1 agreement is the share of positions at which both would have chosen the same token.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers.worker import NotMeasured
from protocol.models import Model
from protocol.rounds import Entry

HELD_OUT = Path(__file__).parent.parent / "held_out.txt"
ROWS = 128  # of logits that are turned into probabilities at once
Logits = NDArray[np.float32]  # [positions, vocabulary]


def held_out(model: Model, passages: int | None = None) -> list[list[int]]:
    """Token ids of each passage."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    texts = HELD_OUT.read_text().split("\n=====\n")[:passages]
    return [tokenizer.encode(text.strip()).ids for text in texts]


def judge(entries: Sequence[Entry], model: Model, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Each engine's distance from the reference; workers are started and ended one after another."""
    reference, found = _reference(model, texts), []
    for entry in entries:
        row: dict[str, Any] = {"name": entry.engine.name, "class": entry.engine.kind}
        row["precision"] = entry.engine.precision
        try:
            row |= _compare(reference, _logits(entry, texts)) | {"positions": len(reference)}
        except NotMeasured as reason:
            row["not_measured"] = str(reason)
        finally:
            entry.close()
        found.append(row)
    return found


def _logits(entry: Entry, texts: list[list[int]]) -> Logits:
    entry.start()
    if entry.worker is None:
        raise NotMeasured(entry.cannot)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.npy"
        entry.worker.ask("logits", texts=texts, file=str(file))
        return np.load(file)


def _reference(model: Model, texts: list[list[int]]) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.concatenate([loaded(torch.tensor([ids])).logits[0].numpy() for ids in texts])


def _compare(reference: Logits, other: Logits) -> dict[str, float]:
    if other.shape != reference.shape:
        raise NotMeasured(f"it gave logits {other.shape}, not {reference.shape}")
    kl = []
    for start in range(0, len(reference), ROWS):
        expected, actual = (_log_softmax(rows[start : start + ROWS]) for rows in (reference, other))
        kl.append((np.exp(expected) * (expected - actual)).sum(-1))
    values = np.concatenate(kl)
    return {
        "kl_nats": float(values.mean()),
        "kl_standard_error": float(values.std() / len(values) ** 0.5),
        "top1_agreement": float((reference.argmax(-1) == other.argmax(-1)).mean()),
    }


def _log_softmax(rows: Logits) -> NDArray[np.float64]:
    values = rows.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))
