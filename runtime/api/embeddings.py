"""What an embedding engine is asked, as tokens, and what its rows are as vectors and scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginewright.embedding import EmbeddingConfig
from enginewright.errors import EngineError, UsageError, shorten
from enginewright.runtime.core.embedding_core import TextTokens, too_long
from enginewright.runtime.core.prompts import Prompt, PromptTooLongError, encode_prompt, text_of
from enginewright.runtime.engine import Engine

Vector = NDArray[np.float32]
WHOLE = -1  # as truncate_prompt_tokens: the longest text of the model


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What came of a text, under vLLM's names."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """What came of a pair of texts, under vLLM's names."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of both, one behind the other
    finished: bool = True


class TextReader:
    """Makes tokens of texts as the model wants them.

    Args:
        max_model_len: tokens of a text.
        truncate: tokens that are kept of a longer text; WHOLE is max_model_len, and None refuses it.

    Raises:
        UsageError: `truncate` is no such number.
    """

    def __init__(self, engine: Engine, max_model_len: int, truncate: int | None = None) -> None:
        if truncate is not None and not (type(truncate) is int and (truncate == WHOLE or truncate >= 1)):
            raise UsageError(
                f"truncate_prompt_tokens is {shorten(truncate)}", "it must be at least 1, or -1 for what fits"
            )
        if truncate is not None and truncate > max_model_len:
            raise UsageError(
                f"truncate_prompt_tokens is {truncate}",
                f"this model's maximum context length is {max_model_len} tokens",
            )
        self._engine, self._max = engine, max_model_len
        self._kept = max_model_len if truncate == WHOLE else truncate

    def text(self, prompt: Prompt, prompt_name: str | None = None) -> TextTokens:
        """Of an embedding model: a text, with what such texts begin with, or token ids.

        Raises:
            UsageError: it is neither, there is no prompt of that name, or one is named for token ids.
            PromptTooLongError: it is longer than the model's longest text.
        """
        beginning, tokenizer, text = self._beginning(prompt_name), self._engine.tokenizer, text_of(prompt)
        if text is not None:
            prompt = beginning + text
        elif prompt_name is not None:
            raise UsageError("prompt_name goes with texts", "token ids have to begin with the prompt's already")
        if self._kept is None or text is None:
            try:
                ids = encode_prompt(prompt, tokenizer, self._max)
            except PromptTooLongError as error:
                raise too_long(error.what, self._max) from error
            return TextTokens(ids[: self._kept])
        ids, plain = tokenizer.encode(beginning + text), tokenizer.encode(beginning + text, add_special_tokens=False)
        return TextTokens(self._cut(ids, _find(plain, ids), len(plain)))

    def pair(self, first: str, second: str) -> TextTokens:
        """Of a cross-encoder: two texts, of which the second is cut.

        Raises:
            PromptTooLongError: they are longer than the model's longest text.
        """
        tokenizer = self._engine.tokenizer
        ids, begin, second_from = tokenizer.encode_pair(first, second)
        if self._kept is not None:
            length = len(tokenizer.encode(second, add_special_tokens=False))
            ids = self._cut(ids, begin, length)
        if len(ids) > self._max:
            raise too_long(f"the prompt has {len(ids)} tokens", self._max)
        return TextTokens(ids, second_from)

    def _beginning(self, name: str | None) -> str:
        prompts = self._engine.embedding.prompts
        name = self._engine.embedding.default_prompt if name is None else name
        if name is not None and name not in prompts:
            known = f"there are {', '.join(prompts)}" if prompts else "the model has none"
            raise UsageError(f"prompt_name is {shorten(name)}", known)
        return "" if name is None else prompts[name]

    def _cut(self, ids: list[int], begin: int, length: int) -> list[int]:
        """Leave out of a text, which begins there in its tokens, what is too much."""
        assert self._kept is not None
        too_many = max(len(ids) - self._kept, 0)
        if too_many > length:
            raise UsageError(
                f"truncate_prompt_tokens is {self._kept}", f"{len(ids) - length} tokens stand around what could be cut"
            )
        end = begin + length
        return ids[: end - too_many] + ids[end:]


def _find(part: Sequence[int], ids: Sequence[int]) -> int:
    """Where a text's own tokens begin, of which special ones may stand around."""
    starts = range(len(ids) - len(part) + 1)
    return next((start for start in starts if list(ids[start : start + len(part)]) == list(part)), 0)


def check_dimensions(engine: Engine, dimensions: int | None) -> None:
    """Raises UsageError where a vector of so many numbers is none."""
    config, width = engine.embedding, engine.plan.buffers[engine.plan.result].columns
    if dimensions is None or dimensions == width:
        return
    if not config.any_dimensions and not config.dimensions:
        raise UsageError(
            f"dimensions is {shorten(dimensions)}", f"vectors of this model have {width} numbers and cannot be cut"
        )
    if type(dimensions) is not int or not 1 <= dimensions <= width:
        raise UsageError(f"dimensions is {shorten(dimensions)}", f"it must be from 1 to {width}")
    if config.dimensions and dimensions not in config.dimensions:
        known = ", ".join(map(str, config.dimensions))
        raise UsageError(f"dimensions is {dimensions}", f"vectors of this model may have {known} numbers")


def vector_of(config: EmbeddingConfig, row: Vector, dimensions: int | None = None) -> Vector:
    """A row as a vector."""
    vector = row[:dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if config.normalize else vector


def cosine(one: Vector, other: Vector) -> float:
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def score_of(config: EmbeddingConfig, row: Vector) -> float:
    """Of a cross-encoder."""
    score = float(row[0])
    return score if config.activation == "identity" else float(1 / (1 + np.exp(-score)))


def pairs_of(first: object, second: object) -> list[tuple[str, str]]:
    """A text with each of several, or each of several with its own.

    Raises:
        UsageError: they are not texts, or do not fit together.
    """
    lists = [[each] if isinstance(each, str) else each for each in (first, second)]
    for name, each in zip(("text_1", "text_2"), lists, strict=True):
        if not isinstance(each, list | tuple) or not each or not all(isinstance(text, str) for text in each):
            raise UsageError(f"{name} is {shorten(each)}", "it must be a text, or a list of texts")
    ones, others = (list(each) for each in lists)  # type: ignore[call-overload]
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise UsageError(f"text_1 has {len(ones)} texts, and text_2 {len(others)}", "each needs its own, or all one")
    return list(zip(ones, others, strict=True))


@dataclass(frozen=True)
class Score:
    """Of a pair of texts, and its tokens."""

    score: float
    ids: list[int]


def tokens_to_score(engine: Engine, reader: TextReader, pairs: Sequence[tuple[str, str]]) -> list[TextTokens]:
    """What has to be computed: of a cross-encoder each pair, of an embedding model the texts of all pairs."""
    if not engine.embeds:
        return [reader.pair(*pair) for pair in pairs]
    return [reader.text(text) for text in dict.fromkeys(text for pair in pairs for text in pair)]


def scores_of(
    engine: Engine, pairs: Sequence[tuple[str, str]], texts: Sequence[TextTokens], rows: Sequence[Vector]
) -> list[Score]:
    """The scores of pairs from what was computed of `tokens_to_score`."""
    if not engine.embeds:
        return [Score(score_of(engine.embedding, row), text.ids) for text, row in zip(texts, rows, strict=True)]
    names = dict.fromkeys(text for pair in pairs for text in pair)
    known = {name: (text.ids, row) for name, text, row in zip(names, texts, rows, strict=True)}
    found = [(known[one], known[other]) for one, other in pairs]
    return [Score(cosine(a, b), [*ids, *more]) for (ids, a), (more, b) in found]


def not_finite() -> EngineError:
    return EngineError("the model gives numbers that are not finite", "so the text has no vector")
