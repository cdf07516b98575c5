"""What the subcommands of `engine` share: how words become numbers, options that several take, and errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import click

from enginewright.errors import EngineError, UsageError
from enginewright.targets import parse_targets

# What the extra [build] brings; the base install does without.
BUILDER_NEEDS = ("gguf", "huggingface_hub", "ml_dtypes", "onnx", "onnx_ir", "rich", "safetensors", "torch")


class Count(click.ParamType[int]):
    """A whole number, positive if nothing else is said; `32k` is 32768."""

    name = "count"
    units: ClassVar = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        unit = self.units.get(text[-1:], 1)
        digits = text[:-1] if unit > 1 else text
        if not digits.isascii() or not digits.isdigit() or int(digits) < self.least:
            positive = "positive " if self.least else ""
            self.fail(f"{value!r} is not a {positive}whole number such as 512, 32k or 2g", param, ctx)
        return int(digits) * unit


class Target(click.ParamType[str]):
    """A target, or several in one word."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_targets([value])
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Commands(click.Group):
    """Suggests the nearest command; ends with the exit code of an EngineError."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            click.echo(f"engine: {error}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            if error.name not in BUILDER_NEEDS:
                raise
            click.echo(f"engine: this command needs the builder, and {error.name} is not installed", err=True)
            click.echo("Install it with: pip install 'enginewright[build]'", err=True)
            ctx.exit(UsageError.exit_code)
        except BrokenPipeError:
            ctx.exit(1)


class BenchCommands(Commands):
    """`engine bench --profile ENGINE` is `engine bench profile ENGINE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["profile", *args[1:]] if args[:1] == ["--profile"] else args)


def _with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


LIMITS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "enable_prefix_caching",
    "device",
    "threads",
    "isa",
)
LIMIT_OPTIONS = _with_options(
    click.option("--max-model-len", type=Count(), help="Positions of a sequence, prompt and answer.  [the engine's]"),
    click.option("--max-num-seqs", type=Count(), default=32, show_default=True, help="Sequences in one step."),
    click.option("--max-num-batched-tokens", type=Count(), default=512, show_default=True, help="Tokens in one step."),
    click.option("--kv-cache-memory", type=Count(), help="Bytes for the KV cache, e.g. 2g.  [half of what is free]"),
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        show_default=True,
        help="Prompts that begin alike share what is computed of them.",
    ),
    click.option(
        "--device", default="auto", help="auto, cpu, cuda, or cuda:1 for the second GPU.  [auto: a GPU if possible]"
    ),
    click.option("--threads", type=Count(), help="Threads.  [all cores, or ENGINEWRIGHT_NUM_THREADS]"),
    click.option(
        "--isa",
        help="Instruction set: amx, avx512, avx512-vnni, avx2-vnni, avx2, portable.  "
        "[the best, or ENGINEWRIGHT_CPU_ISA]",
    ),
)

WORKLOAD = ("num_prompts", "input_len", "output_len", "shared_prefix_len", "dataset", "seed", "ignore_eos")
WORKLOAD_OPTIONS = _with_options(
    click.option("--num-prompts", type=Count(), help="Requests.  [32, or all of --dataset]"),
    click.option("--input-len", default="128", show_default=True, help="Tokens of a prompt; 64:256 draws them."),
    click.option("--output-len", default="64", show_default=True, help="Tokens of an answer; 64:256 draws them."),
    click.option("--shared-prefix-len", type=int, default=0, help="Of which all prompts have so many in common."),
    click.option(
        "--dataset",
        type=click.Path(path_type=Path, dir_okay=False),
        help='JSON lines instead, each {"prompt": …} or {"messages": […]}, with max_tokens if it differs.',
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and arrivals."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers of full length."),
)

GROUP_SIZES = (32, 64, 128, 256, 512, 0)
QUANT_OPTIONS = _with_options(
    click.option(
        "--group-size",
        type=click.Choice(GROUP_SIZES),
        help="Columns that share a scale, 0 for all.  [the method's]",
    ),
    click.option("--zero-points", is_flag=True, default=None, help="Weights of 4 bits with a zero point a group."),
    click.option(
        "--quantize-lm-head", is_flag=True, default=None, help="The head, if it is not tied, as other layers."
    ),
    click.option(
        "--fp8-scales",
        type=click.Choice(("tensor", "channel", "block")),
        help="fp8: what has a scale: a weight, a row of it, or 128×128 of it.  [channel]",
    ),
    click.option(
        "--fp8-activations",
        type=click.Choice(("fp8", "bf16")),
        help="fp8: activations on GPUs; fp8 has a scale a token, or 128 columns of it with blocks.  [fp8]",
    ),
    click.option(
        "--activation-scheme",
        type=click.Choice(("dynamic", "static")),
        help="int8-sq: scales of activations by token, or fixed by calibration.  [dynamic]",
    ),
    click.option("--bits", help="auto: bits a weight on average, such as 4.6.  [5]"),
    click.option("--act-order/--no-act-order", default=None, help="int4-gptq: columns that matter most first.  [yes]"),
    click.option("--damping", type=Count(), help="int4-gptq: of the Hessian, in hundredths of its mean.  [1]"),
)
