"""Workloads of benchmarks: prompts and lengths of completions, sampled by a seed or read from a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from enginewright.errors import UsageError
from enginewright.input_lines import read_lines

# A text, token ids, or messages with role and content.
WorkloadPrompt = str | list[int] | list[dict[str, Any]]

DEFAULT_PROMPTS = 32
# Random streams of one seed: lengths do not change with prompts, and so on.
PROMPTS, INPUT_LENGTHS, OUTPUT_LENGTHS, ARRIVALS, WARM_UP = range(5)
# Words of synthetic text, for servers that accept no token ids; in most vocabularies each of these is a token.
_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name
"""
WORDS = tuple(_NOUNS.split())


@dataclass(frozen=True)
class Lengths:
    """A range of lengths in tokens, sampled uniformly, both ends included."""

    min_tokens: int  # minimum
    max_tokens: int  # maximum

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """Parses `128` or `64:256`; `1k` is 1024.

        Args:
            text: the text.
            option: name of the option, for errors.

        Raises:
            UsageError: the text has another form, or the range is empty.
        """
        low, colon, high = text.strip().lower().partition(":")
        lengths = cls(_count(low, text, option), _count(high if colon else low, text, option))
        if lengths.min_tokens > lengths.max_tokens:
            raise UsageError(
                f"{option} {text} is an empty range", "it ends before it begins", f"Write {high}:{low}, perhaps."
            )
        return lengths

    def sample(self, random: np.random.Generator, count: int) -> list[int]:
        """Samples lengths.

        Args:
            random: generator.
            count: number of lengths.
        """
        return [int(length) for length in random.integers(self.min_tokens, self.max_tokens, count, endpoint=True)]

    def __str__(self) -> str:
        if self.min_tokens == self.max_tokens:
            return str(self.min_tokens)
        return f"{self.min_tokens}:{self.max_tokens}"


def _count(digits: str, text: str, option: str) -> int:
    unit = 1024 if digits.endswith("k") else 1
    number = digits.removesuffix("k")
    if not number.isascii() or not number.isdecimal() or int(number) == 0:
        raise UsageError(f"{option} {text} is not a length", fix="Write a whole number above 0, or two: 64:256.")
    return int(number) * unit


@dataclass(frozen=True)
class WorkloadConfig:
    """Options of the workload.

    Raises:
        UsageError: the numbers make no sense together.
    """

    num_prompts: int | None = None  # number of requests; None is the whole dataset, or 32
    input_len: Lengths = Lengths(128, 128)  # tokens of synthetic prompts
    output_len: Lengths = Lengths(64, 64)  # tokens of completions; with a dataset, for lines without max_tokens
    shared_prefix_len: int = 0  # tokens at the start of each prompt, part of its length, that all prompts share
    dataset: Path | None = None  # JSON lines in place of synthetic prompts
    seed: int = 0  # seed of prompts and lengths
    ignore_eos: bool = True  # True if completions have the full length whatever the model samples

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise UsageError(f"--num-prompts is {self.num_prompts}", "it must be at least 1")
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}", "it must not be negative")
        if self.shared_prefix_len < 0:
            raise UsageError(f"--shared-prefix-len is {self.shared_prefix_len}", "it must not be negative")
        if self.dataset is None and self.shared_prefix_len >= self.input_len.min_tokens:
            raise UsageError(
                f"--shared-prefix-len {self.shared_prefix_len} leaves nothing of --input-len {self.input_len}",
                "the shared prefix is part of each prompt's length",
                "Use a shorter prefix or longer prompts.",
            )
        if self.dataset is not None and self.shared_prefix_len:
            raise UsageError("--shared-prefix-len does not go with --dataset", "its prompts are what the file has")

    def to_dict(self) -> dict[str, Any]:
        """Converts the options for a JSON report, with the dataset's file name alone."""
        return {
            "num_prompts": self.num_prompts,
            "input_len": str(self.input_len) if self.dataset is None else None,
            "output_len": str(self.output_len),
            "shared_prefix_len": self.shared_prefix_len,
            "dataset": self.dataset.name if self.dataset is not None else None,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }


def workload_config(input_len: str, output_len: str, **options: Any) -> WorkloadConfig:
    """Makes the config from the command's options.

    Args:
        input_len: lengths of prompts, as `Lengths.parse` reads them.
        output_len: lengths of completions, as `Lengths.parse` reads them.
        options: other fields of WorkloadConfig.

    Raises:
        UsageError: an option is not valid.
    """
    lengths = Lengths.parse(input_len, "--input-len"), Lengths.parse(output_len, "--output-len")
    return WorkloadConfig(input_len=lengths[0], output_len=lengths[1], **options)


@dataclass(frozen=True)
class WorkloadRequest:
    """One request."""

    prompt: WorkloadPrompt  # prompt
    max_tokens: int  # tokens of the completion
    line: int | None = None  # number of the line in the dataset


def rng(config: WorkloadConfig, stream: int) -> np.random.Generator:
    """Makes the generator of a random stream.

    Args:
        config: options, with the seed.
        stream: number of the stream.
    """
    return np.random.default_rng([config.seed, stream])


def token_ids(vocab_size: int) -> Sequence[int]:
    """Returns ids for synthetic prompts, without the first tenth, where most vocabularies have special tokens."""
    return range(vocab_size // 10, vocab_size)


def synthetic(
    config: WorkloadConfig, alphabet: Sequence[int] | Sequence[str], count: int, stream: int = PROMPTS
) -> list[WorkloadRequest]:
    """Makes random prompts.

    Args:
        config: options.
        alphabet: token ids, or words: a prompt is then a text of that number of words.
        count: number of prompts.
        stream: random stream of the prompts.
    """
    random = rng(config, stream)

    def sample(length: int) -> list[Any]:
        return [alphabet[index] for index in random.integers(len(alphabet), size=length).tolist()]

    prefix = sample(config.shared_prefix_len)
    inputs = config.input_len.sample(rng(config, INPUT_LENGTHS), count)
    outputs = config.output_len.sample(rng(config, OUTPUT_LENGTHS), count)
    items = []
    for length, max_tokens in zip(inputs, outputs, strict=True):
        prompt = prefix + sample(length - len(prefix))
        items.append(WorkloadRequest(" ".join(prompt) if isinstance(alphabet[0], str) else prompt, max_tokens))
    return items


def workload(
    config: WorkloadConfig,
    alphabet: Sequence[int] | Sequence[str],
    convert: Callable[[WorkloadPrompt], WorkloadPrompt] = lambda it: it,
) -> list[WorkloadRequest]:
    """Makes the requests of a benchmark, in order.

    Args:
        config: options.
        alphabet: token ids or words of synthetic prompts.
        convert: converts a prompt of the dataset to the form in which it is sent.

    Raises:
        UsageError: the dataset cannot be read (with the number of the line), or has fewer prompts than requested.
    """
    if config.dataset is None:
        return synthetic(config, alphabet, config.num_prompts or DEFAULT_PROMPTS)
    lines = _lines(config.dataset)
    if config.num_prompts is not None and len(lines) < config.num_prompts:
        raise UsageError(
            f"--num-prompts is {config.num_prompts}",
            f"{config.dataset} has {len(lines)}",
            f"Use --num-prompts {len(lines)} or less, or leave it out.",
        )
    lines = lines[: config.num_prompts]
    lengths = config.output_len.sample(rng(config, OUTPUT_LENGTHS), len(lines))
    items = []
    for (number, line), length in zip(lines, lengths, strict=True):
        try:
            prompt, max_tokens = _request(line)
            items.append(WorkloadRequest(convert(prompt), max_tokens or length, number))
        except (UsageError, msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{config.dataset}, line {number}", str(error)) from error
    return items


Ids = list[Annotated[int, msgspec.Meta(ge=0)]]


class _DatasetLine(msgspec.Struct, frozen=True):
    """A line of a dataset; other keys are ignored."""

    prompt: str | Ids | None = None  # text or token ids
    prompt_token_ids: Ids | None = None  # token ids
    messages: list[dict[str, Any]] | None = None  # messages of a chat
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # tokens of the completion


def _lines(path: Path) -> list[tuple[int, bytes]]:
    found = read_lines(path)
    if not found:
        raise UsageError(f"{path} has no prompt", fix='Write one a line: {"prompt": "…"}.')
    return found


def _request(line: bytes) -> tuple[WorkloadPrompt, int | None]:
    fields: Any = msgspec.json.decode(line)
    if not isinstance(fields, Mapping):
        fields = {"prompt_token_ids": fields}
    request = msgspec.convert(fields, type=_DatasetLine)
    given: list[WorkloadPrompt] = [
        prompt for prompt in (request.prompt, request.prompt_token_ids, request.messages) if prompt is not None
    ]
    if len(given) != 1:
        raise UsageError('needs one of "prompt", "prompt_token_ids" and "messages"')
    if not given[0]:
        raise UsageError("has an empty prompt")
    return given[0], request.max_tokens
