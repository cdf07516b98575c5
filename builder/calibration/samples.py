"""Which texts a build calibrates on: some of `--calib-data`, or what the model writes itself.

Samples are short: what they cost (a forward pass in fp32 over all of them, and the writing where there is no data)
grows with their tokens, and many short texts differ more than a few long ones.
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

SAMPLES = 32
SAMPLE_TOKENS = 128
LEAST_TOKENS = 16  # of a sample
MOST_CHARACTERS = 32 * SAMPLE_TOKENS  # of a text; what is behind them is not tokenized
TODAY = datetime(2026, 1, 1)  # to chat templates that print the date: the same inputs give the same bytes on every day

ITSELF = "the model itself"

T = TypeVar("T")


@dataclass(frozen=True)
class Samples:
    """The texts that a build calibrates on."""

    texts: tuple[tuple[int, ...], ...]  # token ids of each sample
    source: str | None  # where they come from; None: the model wrote them

    @property
    def sha256(self) -> str:
        """Of the token ids, as little-endian uint32, with the number of tokens before each text."""
        ids = [number for text in self.texts for number in (len(text), *text)]
        return hashlib.sha256(np.array(ids, "<u4").tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source or ITSELF,
            "samples": len(self.texts),
            "tokens": sum(map(len, self.texts)),
            "sha256": self.sha256,
        }

    def recipe(self) -> dict[str, Any]:
        """What the manifest says, which names no path."""
        return {"calibration": self.to_dict() | ({"source": "data"} if self.source else {})}


def calibrate(checkpoint: Checkpoint, config: BuildConfig, output: Path, progress: Progress) -> Samples | None:
    """The samples for a build; None if its method needs none.

    Raises:
        UsageError: the data is not there, is no text, or has none that is long enough; or the method needs none.
        EngineError: the hub cannot be reached, or there is no space for the engine that writes the samples.
    """
    if not _wanted(config):
        return None
    if config.calib_data is not None:
        progress.phase("read the calibration data")
        return _read_samples(config.calib_data, checkpoint, _count(config))
    texts = generate_samples(checkpoint, _tokenizer(checkpoint), _count(config), SAMPLE_TOKENS, output, progress)
    return Samples(texts, None)


def foresee_samples(checkpoint: Checkpoint, config: BuildConfig) -> dict[str, Any] | None:
    """What is known of the samples, and what is wrong with the data, without a download or a model that writes."""
    if not _wanted(config):
        return None
    if config.calib_data is not None and not is_remote(config.calib_data):
        return _read_samples(config.calib_data, checkpoint, _count(config)).to_dict()
    count = _count(config)
    return {"source": config.calib_data or ITSELF, "samples": count, "tokens": count * SAMPLE_TOKENS}


def _wanted(config: BuildConfig) -> bool:
    if not config.method.calibrated:
        for option, given in (("--calib-data", config.calib_data), ("--calib-size", config.calib_size)):
            if given is not None:
                what = f"{option} means nothing to --quant {config.method.name}"
                raise UsageError(what, "it needs no calibration", "Leave it out.")
    return config.method.calibrated


def _count(config: BuildConfig) -> int:
    return config.calib_size or SAMPLES


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    files = checkpoint.tokenizer
    return Tokenizer(files.tokenizer_json, files.config, files.chat_template, now=lambda: TODAY)


def _read_samples(ref: str, checkpoint: Checkpoint, count: int) -> Samples:
    tokenizer, vocab_size = _tokenizer(checkpoint), checkpoint.config.get("vocab_size", math.inf)
    samples: list[tuple[int, ...]] = []
    for text in _spread(read_texts(ref), count):
        ids = _encode(text, tokenizer)
        # Tokenizers may know tokens that their model has no embedding for.
        if len(ids) >= LEAST_TOKENS and max(ids) < vocab_size:
            samples.append(tuple(ids))
        if len(samples) == count:
            break
    if not samples:
        raise UsageError(
            f"{ref} has no text to calibrate on",
            f"none of its texts has {LEAST_TOKENS} tokens",
            "Give longer texts, or leave --calib-data out: the model then writes some itself.",
        )
    return Samples(tuple(samples), ref)


def _encode(text: CalibrationText, tokenizer: Tokenizer) -> list[int]:
    """The first tokens of a text."""
    if isinstance(text.content, str):
        return tokenizer.encode(text.content[:MOST_CHARACTERS])[:SAMPLE_TOKENS]
    try:
        rendered = tokenizer.render_chat(text.content, add_generation_prompt=False)
    except EngineError as error:  # messages that the template did not expect make it fail
        raise UsageError(
            f"{text.where}: its messages cannot be used", f"{error.what}: {error.why}".rstrip(": ")
        ) from error
    return tokenizer.encode(rendered[:MOST_CHARACTERS], add_special_tokens=False)[:SAMPLE_TOKENS]


def _spread(entries: Sequence[T], count: int) -> Iterator[T]:
    """All entries: the first of each of `count` equal parts, then the second of each, …"""
    bounds = [len(entries) * index // count for index in range(count + 1)]
    for step in range(len(entries)):
        for begin, end in pairwise(bounds):
            if begin + step < end:
                yield entries[begin + step]
