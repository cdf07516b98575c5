"""Converts texts for an embedding engine to tokens, and its rows to vectors and scores."""

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
WHOLE = -1  # value of truncate_prompt_tokens: the maximum length of the model


@dataclass(frozen=True)
class EmbeddingOutput:
    """Vector of a text."""

    embedding: list[float]  # elements of the vector


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """Output for a text, under vLLM's names."""

    request_id: str  # id of the output
    outputs: EmbeddingOutput  # vector of the text
    prompt_token_ids: list[int]  # token ids of the text
    finished: bool = True  # always True


@dataclass(frozen=True)
class ScoringOutput:
    """Similarity of two texts."""

    score: float  # similarity, larger if the texts match better


@dataclass(frozen=True)
class ScoringRequestOutput:
    """Output for a pair of texts, under vLLM's names."""

    request_id: str  # id of the output
    outputs: ScoringOutput  # similarity of the texts
    prompt_token_ids: list[int]  # token ids of the first text, then of the second
    finished: bool = True  # always True


class TextReader:
    """Converts texts to tokens in the form that the model expects.

    Args:
        engine: the engine.
        max_model_len: the maximum number of tokens of a text.
        truncate: the number of tokens that are kept of a longer text; WHOLE is max_model_len, and None refuses it.

    Raises:
        UsageError: `truncate` is not valid.
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
        """Tokenizes a text of an embedding model.

        Args:
            prompt: a text, before which the named prompt is put, or token ids.
            prompt_name: the name of the model's prompt; None is the default one, if there is one.

        Raises:
            UsageError: it is neither, there is no prompt of that name, or one is named for token ids.
            PromptTooLongError: it is longer than the model's maximum length.
        """
        prefix, tokenizer, text = self._prefix(prompt_name), self._engine.tokenizer, text_of(prompt)
        if text is not None:
            prompt = prefix + text
        elif prompt_name is not None:
            raise UsageError(
                "prompt_name is only for texts", "token ids must include the tokens of a prompt themselves"
            )
        if self._kept is None or text is None:
            try:
                ids = encode_prompt(prompt, tokenizer, self._max)
            except PromptTooLongError as error:
                raise too_long(error.what, self._max) from error
            return TextTokens(ids[: self._kept])
        ids, plain = tokenizer.encode(prefix + text), tokenizer.encode(prefix + text, add_special_tokens=False)
        return TextTokens(self._cut(ids, _find(plain, ids), len(plain)))

    def pair(self, first: str, second: str) -> TextTokens:
        """Tokenizes a pair of texts of a cross-encoder; only the second one is truncated.

        Raises:
            PromptTooLongError: they are longer than the model's maximum length.
        """
        tokenizer = self._engine.tokenizer
        ids, begin, second_from = tokenizer.encode_pair(first, second)
        if self._kept is not None:
            length = len(tokenizer.encode(second, add_special_tokens=False))
            ids = self._cut(ids, begin, length)
        if len(ids) > self._max:
            raise too_long(f"the prompt has {len(ids)} tokens", self._max)
        return TextTokens(ids, second_from)

    def _prefix(self, name: str | None) -> str:
        prompts = self._engine.embedding.prompts
        name = self._engine.embedding.default_prompt if name is None else name
        if name is not None and name not in prompts:
            known = f"there are {', '.join(prompts)}" if prompts else "the model has none"
            raise UsageError(f"prompt_name is {shorten(name)}", known)
        return "" if name is None else prompts[name]

    def _cut(self, ids: list[int], begin: int, length: int) -> list[int]:
        """Truncates a text.

        Args:
            ids: token ids with the special ones around the text.
            begin: the index of the text's first token.
            length: the number of the text's tokens.
        """
        assert self._kept is not None
        too_many = max(len(ids) - self._kept, 0)
        if too_many > length:
            raise UsageError(
                f"truncate_prompt_tokens is {self._kept}", f"{len(ids) - length} tokens around the text must be kept"
            )
        end = begin + length
        return ids[: end - too_many] + ids[end:]


def _find(part: Sequence[int], ids: Sequence[int]) -> int:
    """Index of a text's first token, among special ones."""
    starts = range(len(ids) - len(part) + 1)
    return next((start for start in starts if list(ids[start : start + len(part)]) == list(part)), 0)


def check_dimensions(engine: Engine, dimensions: int | None) -> None:
    """Checks a requested number of elements of a vector.

    Raises:
        UsageError: the model's vectors cannot have this number of elements.
    """
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
    """Converts a row to a vector: cuts it to `dimensions` elements, and normalizes it if the model does."""
    vector = row[:dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if config.normalize else vector


def cosine(one: Vector, other: Vector) -> float:
    """Cosine of the angle between two vectors."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))


def score_of(config: EmbeddingConfig, row: Vector) -> float:
    """Score of a cross-encoder from its row."""
    score = float(row[0])
    return score if config.activation == "identity" else float(1 / (1 + np.exp(-score)))


def pairs_of(first: object, second: object) -> list[tuple[str, str]]:
    """Pairs one text with each of several, or texts one by one.

    Args:
        first: a text, or a list of texts.
        second: a text, or a list of texts.

    Raises:
        UsageError: they are not texts, or do not match in number.
    """
    lists = [[each] if isinstance(each, str) else each for each in (first, second)]
    for name, each in zip(("text_1", "text_2"), lists, strict=True):
        if not isinstance(each, list | tuple) or not each or not all(isinstance(text, str) for text in each):
            raise UsageError(f"{name} is {shorten(each)}", "it must be a text, or a list of texts")
    ones, others = (list(each) for each in lists)  # type: ignore[call-overload]
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise UsageError(f"text_1 has {len(ones)} texts, and text_2 {len(others)}", "give one text, or one for each")
    return list(zip(ones, others, strict=True))


@dataclass(frozen=True)
class Score:
    """Score of a pair of texts."""

    score: float  # similarity of the texts
    ids: list[int]  # token ids of both texts


def tokens_to_score(engine: Engine, reader: TextReader, pairs: Sequence[tuple[str, str]]) -> list[TextTokens]:
    """The inputs to compute: each pair for a cross-encoder, the texts of all pairs for an embedding model."""
    if not engine.embeds:
        return [reader.pair(*pair) for pair in pairs]
    return [reader.text(text) for text in dict.fromkeys(text for pair in pairs for text in pair)]


def scores_of(
    engine: Engine, pairs: Sequence[tuple[str, str]], texts: Sequence[TextTokens], rows: Sequence[Vector]
) -> list[Score]:
    """Scores of pairs.

    Args:
        engine: the engine.
        pairs: the pairs of texts.
        texts: the inputs from `tokens_to_score`.
        rows: the rows that the engine computed for them.
    """
    if not engine.embeds:
        return [Score(score_of(engine.embedding, row), text.ids) for text, row in zip(texts, rows, strict=True)]
    names = dict.fromkeys(text for pair in pairs for text in pair)
    known = {name: (text.ids, row) for name, text, row in zip(names, texts, rows, strict=True)}
    found = [(known[one], known[other]) for one, other in pairs]
    return [Score(cosine(a, b), [*ids, *more]) for (ids, a), (more, b) in found]


def not_finite() -> EngineError:
    """Error of a text whose numbers are not finite."""
    return EngineError("the model gives numbers that are not finite", "so the text has no vector")
