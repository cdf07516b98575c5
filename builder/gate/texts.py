"""Held-out text: what engine and source are compared on. Nothing is calibrated on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.errors import UnsupportedModelError
from enginewright.runtime.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).with_name("held_out.txt")
_MARK = "===== "  # and the name of the text that follows


@dataclass(frozen=True)
class HeldOutText:
    """A text of the held-out file."""

    name: str  # what the report calls it
    tokens: Sequence[int]  # in the model's vocabulary


def held_out(
    tokenizer: Tokenizer, vocab_size: int, most_tokens: int | None = None, longest: int | None = None
) -> list[HeldOutText]:
    """The texts in the model's tokens, each cut by the same share so that they have no more than `most_tokens` in all,
    and none more than `longest`.

    Raises:
        UnsupportedModelError: the tokenizer gives tokens that the model does not have.
    """
    texts = []
    for entry in HELD_OUT.read_text(encoding="utf-8").split(_MARK)[1:]:
        name, _, text = entry.partition("\n")
        texts.append(HeldOutText(name, tokenizer.encode(text.strip())))
    total = sum(len(text.tokens) for text in texts)
    share = 1.0 if most_tokens is None else min(most_tokens / total, 1.0)
    texts = [HeldOutText(text.name, text.tokens[: int(len(text.tokens) * share)][:longest]) for text in texts]
    unknown = max(max(text.tokens, default=0) for text in texts)
    if unknown >= vocab_size:
        raise UnsupportedModelError(
            "the tokenizer does not belong to the model",
            f"it gives token {unknown}, and the model has {vocab_size}",
            "Is tokenizer.json of the same model?",
        )
    return [text for text in texts if text.tokens]
