"""What the commands of `engine` share: types of values, groups of options, and how errors are shown."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from enginewright.checkpoint_ref import check_written_path
from enginewright.cli_help import SectionCommand, section, with_options
from enginewright.cli_hints import hint_for_command, hint_for_quant, hint_for_target
from enginewright.cli_process import INTERRUPTED, open_standard_streams, sigterm_ends_the_command
from enginewright.errors import EngineError, UsageError
from enginewright.printable import printable_lines, printable_values
from enginewright.runtime.config import MAX_GUESSES, SPECULATE
from enginewright.runtime.count import parse_bytes, parse_count
from enginewright.targets import SMS, parse_targets

# What the base install does without, by the extra that brings it.
EXTRAS = {
    "build": ("gguf", "huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "rich", "safetensors", "torch"),
    "bench": ("enginewright_bench",),
    "sign": ("OpenSSL", "cryptography", "model_signing", "sigstore"),
}


class Count(click.ParamType[int]):
    """A whole number, positive if nothing else is said; `32k` is 32768."""

    name = "count"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_count(str(value), self.least)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class EnginePath(click.Path):
    """The path of an engine file. One that begins like a path (./, ../, /, ~) is never taken for a hub id."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        check_written_path(str(value))
        return super().convert(value, param, ctx)


class Bytes(click.ParamType[int]):
    """A size in bytes; `2g` and `2GiB` are 2 * 2**30, `2GB` is 2 * 10**9."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class JsonObject(click.ParamType[dict[str, Any]]):
    """An object in JSON: {"enable_thinking": false}."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value!r} is no JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is no JSON object", param, ctx)
        return found


class Target(click.ParamType[str]):
    """A target, or several that are joined by + or commas."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if hint := hint_for_target(str(value), SMS):
            self.fail(f"{value!r} names no GPU architecture. {hint}", param, ctx)
        try:
            parse_targets([value])
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Quant(click.Choice[str]):
    """A quantization method; a name from elsewhere is answered with the one that it means."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = hint_for_quant(str(value), self.choices)
            self.fail(f"{error.message} {hint}".rstrip(), param, ctx)


class Commands(click.Group):
    """A group that suggests the nearest command, and ends with the exit code of an EngineError."""

    command_class = SectionCommand
    program = "engine"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = hint_for_command(args, self.list_commands(ctx), self.program)
            raise click.UsageError(f"{error.message} {hint}".rstrip(), ctx) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_streams()
        with sigterm_ends_the_command():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a stdout that nobody reads fails here, and not when Python ends
            return result
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except EngineError as error:
            click.echo(f"engine: {error}", err=True)
            ctx.exit(error.exit_code)
        except click.UsageError as error:  # it quotes what was typed, and names of files
            shown = printable_lines(message := error.format_message())
            if shown == message:
                raise
            raise click.UsageError(shown, error.ctx) from None
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            extra = next((extra for extra, packages in EXTRAS.items() if missing in packages), None)
            if extra is None:
                raise
            click.echo(f"engine: this command needs {missing}, which is not installed", err=True)
            click.echo(f"Install it with: pip install 'enginewright[{extra}]'", err=True)
            ctx.exit(UsageError.exit_code)


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people. What is not printable in the names that they hold is escaped."""
    click.echo(printable_lines(text), err=err)


def show(report: Mapping[str, Any], describe: Callable[[dict[str, Any]], str] | None) -> None:
    """Print a report on stdout, as lines for people or, without `describe`, as JSON."""
    click.echo(json.dumps(report) if describe is None else describe(printable_values(report)))


def refuse_stray_question(context: click.Context, engine: Path) -> None:
    """Say where a question belongs that stands behind the engine without an option.

    Raises:
        UsageError: there is such a word.
    """
    if context.args:
        question = " ".join(context.args)
        command = shlex.join(["engine", "generate", str(engine), "--chat", question])
        raise UsageError(
            f"{question!r} belongs to no option",
            "a question needs --chat, and a text to continue --prompt",
            f"Did you mean: {command}",
        )


class BenchCommands(Commands):
    """`engine bench --profile ENGINE` is `engine bench profile ENGINE`."""

    program = "engine bench"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["profile", *args[1:]] if args[:1] == ["--profile"] else args)


_limits = section("Limits")
_kv_cache = section("KV cache")
_machine = section("Machine")
_speculation = section("Speculation")

THREADS_OPTION = _machine(
    "--threads",
    type=Count(),
    show_default="ENGINEWRIGHT_NUM_THREADS, or the number of physical cores",
    help="CPU threads that compute.",
)
ISA_OPTION = _machine(
    "--isa",
    show_default="ENGINEWRIGHT_CPU_ISA, or the best that this CPU has",
    help="CPU instruction set: amx, avx512, avx512-vnni, avx2-vnni, avx2 or portable.",
)
MMAP_OPTION = _machine(
    "--mmap/--no-mmap",
    default=True,
    help="Memory-map the weights: the start is quick, and processes share them. --no-mmap copies them into memory, "
    "which is safe if somebody may write to the file.",
)
DEVICE_OPTION = _machine(
    "--device",
    default="auto",
    help="Where the engine runs: cpu, cuda, cuda:1 for the second GPU, or auto, which takes the first GPU if the "
    "engine has code for it, and otherwise the CPU.",
)

# Options of every command that runs an engine, and the names of their values.
LIMITS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "enable_prefix_caching",
    "speculate",
    "speculate_tokens",
    "device",
    "threads",
    "isa",
    "mmap",
)
LIMIT_OPTIONS = with_options(
    _limits(
        "--max-model-len",
        type=Count(),
        show_default="what the engine was built for",
        help="Longest sequence in tokens: prompt and answer together. 32k is 32768.",
    ),
    _limits(
        "--max-num-seqs",
        type=Count(),
        default=32,
        help="Maximum number of sequences in one step (the batch size).",
    ),
    _limits(
        "--max-num-batched-tokens",
        type=Count(),
        default=512,
        help="Maximum number of tokens in one step, over all sequences. Longer prompts take several steps.",
    ),
    _kv_cache(
        "--kv-cache-memory",
        type=Bytes(),
        show_default="half of the memory that weights and activations leave free",
        help="Memory for the KV cache, of the GPU if the engine runs on one: 2GiB, 2g (the same), 2GB or 512m.",
    ),
    _kv_cache(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        help="Keep the KV cache of prompts, so that a prompt with the same beginning need not compute it again.",
    ),
    _speculation(
        "--speculate",
        type=click.Choice(SPECULATE),
        show_default="what the engine names (engine build --draft auto), or off",
        help="Guess the next tokens, and check several guesses in one step. Answers are the same, to the bit, and come "
        "faster where many guesses are right. ngram looks up what followed the last tokens where they came before, in "
        "prompt, answer or earlier answers. draft asks the smaller model, skip the first layers of the model itself, "
        "mtp the layer that its checkpoint carries for that, and eagle and medusa heads that were trained for it: what "
        "`engine build --draft` has put into the engine.",
    ),
    _speculation(
        "--speculate-tokens",
        type=Count(),
        default=8,
        help=f"Maximum number of guesses for a sequence in one step, up to {MAX_GUESSES}. Fewer are made where they do "
        "not pay.",
    ),
    DEVICE_OPTION,
    THREADS_OPTION,
    ISA_OPTION,
    MMAP_OPTION,
)

_workload = section("Requests")
# Options of the commands that measure, and the names of their values.
WORKLOAD = ("num_prompts", "input_len", "output_len", "shared_prefix_len", "dataset", "seed", "ignore_eos")
WORKLOAD_OPTIONS = with_options(
    _workload("--num-prompts", type=Count(), show_default="32, or every line of --dataset", help="Number of requests."),
    _workload(
        "--input-len",
        default="128",
        help="Length of each prompt in tokens. 64:256 draws a random length from 64 to 256 for each.",
    ),
    _workload(
        "--output-len",
        default="64",
        help="Length of each answer in tokens. 64:256 draws a random length from 64 to 256 for each.",
    ),
    _workload(
        "--shared-prefix-len",
        type=int,
        default=0,
        help="Number of tokens at the beginning of each prompt that are the same in all prompts.",
    ),
    _workload(
        "--dataset",
        type=click.Path(path_type=Path, dir_okay=False),
        show_default="random prompts",
        help='Take the prompts from a file of JSON lines, each {"prompt": …} or {"messages": […]}, with "max_tokens" '
        "where the length of the answer is not --output-len.",
    ),
    _workload(
        "--seed",
        type=int,
        default=0,
        help="Seed of all that is random: prompts, lengths and, of a server, times of arrival.",
    ),
    _workload(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        help="Continue each answer to its full length, even if the model would end it earlier.",
    ),
)

_format = section("Format")
GROUP_SIZES = (32, 64, 128, 256, 512, 0)
# Settings of single quantization methods; a method that has no such setting refuses it.
QUANT_OPTIONS = with_options(
    _format(
        "--group-size",
        type=click.Choice(GROUP_SIZES),
        show_default="the method's own",
        help="Number of columns of a weight that share one scale; 0 is one scale for a whole row.",
    ),
    _format(
        "--zero-points",
        is_flag=True,
        default=None,
        help="Give each group of 4-bit weights a zero point as well as a scale (asymmetric quantization).",
    ),
    _format(
        "--quantize-lm-head",
        is_flag=True,
        default=None,
        help="Quantize the output head (lm_head) like the other layers, if it does not share the embedding's weights. "
        "Otherwise it is int8, or bf16 with --quant bf16.",
    ),
    _format(
        "--fp8-scales",
        type=click.Choice(("tensor", "channel", "block")),
        show_default="channel",
        help="Only for --quant fp8: one scale for each weight (tensor), each of its rows (channel), or each block of "
        "128×128 numbers (block).",
    ),
    _format(
        "--fp8-activations",
        type=click.Choice(("fp8", "bf16")),
        show_default="fp8",
        help="Only for --quant fp8: the format of activations on GPUs. fp8 has one scale for each token, or with "
        "--fp8-scales block one for each 128 columns of a token.",
    ),
    _format(
        "--activation-scheme",
        type=click.Choice(("dynamic", "static")),
        show_default="dynamic",
        help="Only for --quant int8-sq: scale activations by what each token holds (dynamic), or by fixed scales from "
        "calibration (static).",
    ),
    _format(
        "--bits",
        show_default="5",
        help="Only for --quant auto: the average number of bits for each weight, such as 4.6, scales included.",
    ),
    _format(
        "--act-order/--no-act-order",
        default=None,
        show_default="act-order",
        help="Only for --quant int4-gptq: quantize the columns with the largest activations first.",
    ),
    _format(
        "--damping",
        show_default="0.01",
        help="Only for --quant int4-gptq: added to the diagonal of the Hessian, as a fraction of its mean "
        "(damp_percent in other programs).",
    ),
)

_prompt = section("Prompt")
CHAT_TEMPLATE_OPTION = _prompt(
    "--chat-template-kwargs",
    type=JsonObject(),
    show_default="none",
    help='Variables of the chat template, as JSON: {"enable_thinking": false} turns Qwen3\'s thinking off.',
)

_sampling = section("Sampling")
MODELS_OWN = "the model's own (generation_config.json)"
# How tokens are drawn: fields of SamplingParams.
SAMPLING_OPTIONS = with_options(
    _sampling(
        "--temperature",
        type=float,
        show_default=f"{MODELS_OWN}, or 0",
        help="Randomness of the answer: 0 always takes the likeliest token, 1 draws as the model's probabilities say.",
    ),
    _sampling(
        "--top-k",
        type=int,
        show_default=f"{MODELS_OWN}, or all",
        help="Draw only among this many of the likeliest tokens.",
    ),
    _sampling(
        "--top-p",
        type=float,
        show_default=f"{MODELS_OWN}, or 1",
        help="Draw only among the fewest likeliest tokens whose probabilities add up to this.",
    ),
    _sampling(
        "--min-p",
        type=float,
        show_default=f"{MODELS_OWN}, or 0",
        help="Draw only tokens that are at least this likely, relative to the likeliest one.",
    ),
    _sampling(
        "--repetition-penalty",
        type=float,
        show_default=f"{MODELS_OWN}, or 1",
        help="Above 1, tokens that are already in the prompt or the answer become less likely.",
    ),
    _sampling(
        "--presence-penalty",
        type=float,
        show_default="0",
        help="Above 0, tokens that are already in the answer become less likely, from -2 to 2.",
    ),
    _sampling(
        "--frequency-penalty",
        type=float,
        show_default="0",
        help="The same, but multiplied by how often the token is in the answer.",
    ),
    _sampling(
        "--seed",
        type=int,
        show_default="another one each time",
        help="Seed of the random draws: the same seed gives the same answer.",
    ),
)
