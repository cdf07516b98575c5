"""Held-out text, on which engine and source are compared. Nothing is calibrated on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.errors import UnsupportedModelError
from enginewright.runtime.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).with_name("held_out.txt")
_MARK = "===== "  # the name of the text follows it


@dataclass(frozen=True)
class HeldOutText:
    """A text of the held-out file."""

    name: str  # name in reports
    tokens: Sequence[int]  # tokens in the model's vocabulary


def held_out(
    tokenizer: Tokenizer, vocab_size: int, max_tokens: int | None = None, longest: int | None = None
) -> list[HeldOutText]:
    """Encodes the held-out texts, each cut by the same share.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: tokens of the model's vocabulary.
        max_tokens: tokens of all texts; None is no limit.
        longest: tokens of each text; None is no limit.

    Raises:
        UnsupportedModelError: the tokenizer produces tokens that the model does not have.
    """
    texts = []
    for entry in HELD_OUT.read_text(encoding="utf-8").split(_MARK)[1:]:
        name, _, text = entry.partition("\n")
        texts.append(HeldOutText(name, tokenizer.encode(text.strip())))
    total = sum(len(text.tokens) for text in texts)
    share = 1.0 if max_tokens is None else min(max_tokens / total, 1.0)
    texts = [HeldOutText(text.name, text.tokens[: int(len(text.tokens) * share)][:longest]) for text in texts]
    unknown = max(max(text.tokens, default=0) for text in texts)
    if unknown >= vocab_size:
        raise UnsupportedModelError(
            "the tokenizer does not belong to the model",
            f"it produces token {unknown}, and the model has {vocab_size}",
            "Is tokenizer.json from the same model?",
        )
    return [text for text in texts if text.tokens]
