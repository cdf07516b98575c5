"""Chooses the texts of a calibration: some of `--calib-data`, or texts that the model writes itself.

Samples are short: their cost (a forward pass in fp32 over all of them, and the writing where there is no data) grows
with their tokens, and many short texts differ more than a few long ones.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from enginewright.builder.assembly import BuildConfig
from enginewright.builder.calibration.data import CalibrationText, is_remote, read_texts
from enginewright.builder.calibration.synthetic import generate_samples
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.progress import Progress
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.text.tokenizer import Tokenizer

SAMPLES = 32  # default number of samples
RECOVERY = 8  # samples with --recover for each one that methods see
SAMPLE_TOKENS = 128  # tokens of a sample
MIN_TOKENS = 16  # minimum of a sample's tokens
MAX_CHARACTERS = 32 * SAMPLE_TOKENS  # characters of a text that are tokenized
TODAY = datetime(2026, 1, 1)  # date for chat templates that print one: the same inputs give the same bytes on every day

ITSELF = "the model itself"

T = TypeVar("T")


@dataclass(frozen=True)
class Samples:
    """The texts of a calibration."""

    texts: tuple[tuple[int, ...], ...]  # token ids of each sample
    source: str | None  # source of the texts; None: the model wrote them

    @property
    def sha256(self) -> str:
        """SHA-256 of the token ids, as little-endian uint32, with the number of tokens before each text."""
        ids = [number for text in self.texts for number in (len(text), *text)]
        return hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Converts the facts about the samples to JSON's types."""
        return {
            "source": self.source or ITSELF,
            "samples": len(self.texts),
            "tokens": sum(map(len, self.texts)),
            "sha256": self.sha256,
        }

    def recipe(self) -> dict[str, Any]:
        """Makes the entry of the recipe, without a path."""
        return {"calibration": self.to_dict() | ({"source": "data"} if self.source else {})}


def calibrate(checkpoint: Checkpoint, config: BuildConfig, output: Path, progress: Progress) -> Samples | None:
    """Makes the samples of a build; None if it needs none.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
        output: the engine file, on whose disk the model's own texts are written.
        progress: receiver of progress.

    Raises:
        UsageError: the data is missing, is not text, or has no text that is long enough; or the method needs none.
        EngineError: the hub cannot be reached, or there is no space for the engine that writes the samples.
    """
    if not _wanted(config):
        return None
    if config.calib_data is not None:
        progress.phase("read the calibration data")
        return read_samples(config.calib_data, checkpoint, _count(config))
    texts = generate_samples(checkpoint, _tokenizer(checkpoint), _count(config), SAMPLE_TOKENS, output, progress)
    return Samples(texts, None)


def samples_without_data(checkpoint: Checkpoint, config: BuildConfig) -> dict[str, Any] | None:
    """Predicts the samples, and finds errors of the data, without a download or an engine that writes texts.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
    """
    if not _wanted(config):
        return None
    if config.calib_data is not None and not is_remote(config.calib_data):
        return read_samples(config.calib_data, checkpoint, _count(config)).to_dict()
    count = _count(config)
    return {"source": config.calib_data or ITSELF, "samples": count, "tokens": count * SAMPLE_TOKENS}


def _wanted(config: BuildConfig) -> bool:
    if not config.method.calibrated and config.recover is None:
        for option, given in (("--calib-data", config.calib_data), ("--calib-size", config.calib_size)):
            if given is not None:
                what = f"{option} means nothing to --quant {config.method.name}"
                raise UsageError(what, "it needs no calibration", "Leave it out.")
    return config.method.calibrated or config.recover is not None


def _count(config: BuildConfig) -> int:
    return (config.calib_size or SAMPLES) * (RECOVERY if config.recover else 1)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    files = checkpoint.tokenizer
    return Tokenizer(files.tokenizer_json, files.config, files.chat_template, now=lambda: TODAY)


def read_samples(ref: str, checkpoint: Checkpoint, count: int = SAMPLES) -> Samples:
    """Reads samples from data.

    Args:
        ref: the data, in the form of --calib-data.
        checkpoint: the checkpoint, whose tokenizer encodes the texts.
        count: largest number of samples.

    Raises:
        UsageError: the data is not text, or has no text that is long enough.
        EngineError: the hub cannot be reached.
    """
    tokenizer, vocab_size = _tokenizer(checkpoint), checkpoint.config.get("vocab_size", math.inf)
    samples: list[tuple[int, ...]] = []
    for text in _spread(read_texts(ref), count):
        ids = _encode(text, tokenizer)
        # Tokenizers may have tokens for which their model has no embedding.
        if len(ids) >= MIN_TOKENS and max(ids) < vocab_size:
            samples.append(tuple(ids))
        if len(samples) == count:
            break
    if not samples:
        raise UsageError(
            f"{ref} has no text to calibrate on",
            f"none of its texts has {MIN_TOKENS} tokens",
            "Give longer texts, or leave --calib-data out: then the model writes some itself.",
        )
    return Samples(tuple(samples), ref)


def _encode(text: CalibrationText, tokenizer: Tokenizer) -> list[int]:
    """Encodes the first tokens of a text."""
    if isinstance(text.content, str):
        return tokenizer.encode(text.content[:MAX_CHARACTERS])[:SAMPLE_TOKENS]
    try:
        rendered = tokenizer.render_chat(text.content, add_generation_prompt=False)
    except EngineError as error:  # unexpected messages make a template fail
        raise UsageError(
            f"{text.where}: its messages cannot be used", f"{error.what}: {error.why}".rstrip(": ")
        ) from error
    return tokenizer.encode(rendered[:MAX_CHARACTERS], add_special_tokens=False)[:SAMPLE_TOKENS]


def _spread(entries: Sequence[T], count: int) -> Iterator[T]:
    """Yields all entries: the first of each of `count` equal parts, then the second of each, …"""
    bounds = [len(entries) * index // count for index in range(count + 1)]
    for step in range(len(entries)):
        for begin, end in pairwise(bounds):
            if begin + step < end:
                yield entries[begin + step]
