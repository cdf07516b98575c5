"""Commands that run an engine in this process: `engine generate`, `engine embed` and `engine chat`."""

import shlex
from pathlib import Path
from typing import Any, BinaryIO

import click

from enginewright.cli.help import JSON_OPTION, SectionCommand, section
from enginewright.cli.options import (
    CHAT_TEMPLATE_OPTION,
    LIMIT_OPTIONS,
    LIMITS,
    SAMPLING_OPTIONS,
    VERIFY_OPTION,
    pop_options,
)
from enginewright.cli.values import CountType, EnginePathType, JsonObjectType
from enginewright.errors import UsageError

# Maximum number of tokens of an answer to --prompt without --max-tokens, because a continued text may never end.
PROMPT_TOKENS = 256
STRUCTURE = ("json_schema", "json_object", "regex", "choice", "grammar")  # options that set the structure of an answer

prompt_section, structure_section, output_section = (
    section("Prompt"),
    section("Structure of the answer"),
    section("Output"),
)

LORA_OPTION = prompt_section(
    "--lora",
    metavar="ADAPTER",
    show_default="none",
    help="An adapter that answers: a file that `engine adapter` made, or what PEFT has saved, a folder or OWNER/NAME "
    "on the Hugging Face hub, or a GGUF file. It is then prepared once and kept in the cache.",
)


def refuse_stray_question(context: click.Context, engine: Path) -> None:
    """Refuses a question that was written after the engine without an option, and says how to ask it.

    Raises:
        UsageError: There are such words.
    """
    if context.args:
        question = " ".join(context.args)
        command = shlex.join(["engine", "generate", str(engine), "--chat", question])
        raise UsageError(
            f"{question!r} belongs to no option",
            "a question needs --chat, and a text to continue --prompt",
            f"Did you mean: {command}",
        )


@click.command(cls=SectionCommand, context_settings={"allow_extra_args": True})  # for refuse_stray_question
@click.argument("engine", type=EnginePathType())
@prompt_section("-p", "--prompt", show_default="none", help="A text that the model continues, as it stands.")
@prompt_section("-c", "--chat", show_default="none", help="A message that the model answers, in its chat template.")
@prompt_section("--system", show_default="none", help="A system message before the message of --chat.")
@CHAT_TEMPLATE_OPTION
@prompt_section(
    "--input",
    "batch",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="none",
    help='Answer a file of requests in one batch. Each line is {"prompt": …} or {"messages": […]}, with an "id" and '
    "sampling options if they differ, or OpenAI's batch form.",
)
@LORA_OPTION
@SAMPLING_OPTIONS
@structure_section(
    "--json-schema",
    type=JsonObjectType(),
    show_default="none",
    help='The answer is JSON that follows this schema: \'{"type": "object", …}\', or "$(cat FILE)".',
)
@structure_section("--json-object", is_flag=True, default=None, help="The answer is a JSON object.")
@structure_section("--regex", show_default="none", help="The whole answer matches this regular expression.")
@structure_section(
    "--choice",
    multiple=True,
    show_default="none",
    help="The answer is exactly this text. The option may be given several times; the answer is then one of the texts.",
)
@structure_section(
    "--grammar",
    show_default="none",
    help='The answer follows this grammar, in Lark or llama.cpp\'s GBNF: "$(cat FILE)".',
)
@output_section(
    "--max-tokens",
    type=CountType(),
    show_default=f"{PROMPT_TOKENS} with --prompt, else up to --max-model-len",
    help="Maximum number of tokens in an answer.",
)
@output_section(
    "--stop",
    multiple=True,
    show_default="none",
    help="Text that ends the answer. The option may be given several times.",
)
@output_section(
    "--ignore-eos", is_flag=True, default=None, help="Continue when the model ends its answer, up to --max-tokens."
)
@output_section(
    "--logprobs",
    type=int,
    show_default="none",
    help="Also return the log-probability of each token, and of this many of the most likely tokens at its position "
    "(0 to 20). Needs --json or --input.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="stdout",
    help="File for the answers to --input: JSON lines, in the order of the requests. Each is written as soon as all "
    "answers before it are written.",
)
@output_section(
    "--resume",
    is_flag=True,
    help="Continue an --output that an earlier run has not finished: its answers are kept, and requests with their ids "
    "are skipped.",
)
@JSON_OPTION
@LIMIT_OPTIONS
@VERIFY_OPTION
@click.pass_context
def generate(context: click.Context, /, engine: Path, **options: Any) -> None:
    """Let an engine answer one question, or a file of them.

    ENGINE is a file that `engine build` wrote. Give one of --prompt, --chat and --input.
    """
    from enginewright.builder.model_cache import prepared_adapter
    from enginewright.runtime.commands.generate import generate as run_generate

    refuse_stray_question(context, engine)
    if options["lora"] is not None:
        options["lora"] = prepared_adapter(options["lora"], engine)
    limits, structure = pop_options(options, LIMITS), pop_options(options, STRUCTURE)
    run_generate(engine, limits=limits, structure=structure, prompt_tokens=PROMPT_TOKENS, **options)


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType())
@click.argument("texts", nargs=-1)
@prompt_section(
    "-i",
    "--input",
    "lines",
    type=click.File("rb"),
    show_default="none",
    help="File with a text on each line, in addition to those on the command line; - is standard input.",
)
@prompt_section(
    "--prompt-name", show_default="the model's own", help="Name of the model's prompt that is put before each text."
)
@prompt_section(
    "--truncate-prompt-tokens",
    type=int,
    show_default="longer texts are refused",
    help="Number of tokens that are kept of a longer text; -1 keeps as many as fit.",
)
@output_section(
    "--dimensions",
    type=CountType(),
    show_default="all",
    help="Length of each vector, if the model supports shorter ones.",
)
@LIMIT_OPTIONS
@VERIFY_OPTION
def embed(engine: Path, texts: tuple[str, ...], lines: BinaryIO | None, **options: Any) -> None:
    """Print the vector of each text, as one line of JSON.

    ENGINE is a file that `engine build` wrote from an embedding model.
    """
    from enginewright.runtime.commands.embed import embed as run_embed

    for line in run_embed(engine, texts, lines, **options):
        click.echo(line)


@click.command(cls=SectionCommand, context_settings={"allow_extra_args": True})  # for refuse_stray_question
@click.argument("engine", type=EnginePathType())
@prompt_section("--system", show_default="none", help="A system message before the conversation.")
@CHAT_TEMPLATE_OPTION
@prompt_section(
    "--no-thinking",
    is_flag=True,
    help="Let a model that can think answer without thinking: sets enable_thinking to false in its chat template.",
)
@LORA_OPTION
@SAMPLING_OPTIONS
@output_section(
    "--max-tokens",
    type=CountType(),
    show_default="up to --max-model-len",
    help="Maximum number of tokens in an answer.",
)
@LIMIT_OPTIONS
@VERIFY_OPTION
@click.pass_context
def chat(context: click.Context, /, engine: Path, **options: Any) -> None:
    """Talk to an engine on the terminal.

    ENGINE is a file that `engine build` wrote. Ctrl-C stops an answer, Ctrl-D ends the conversation, and /help lists
    the commands. Text from a pipe is read as one message a line, and only answers are printed on stdout.
    """
    from enginewright.builder.model_cache import prepared_adapter
    from enginewright.runtime.commands.terminal_chat import chat as run_chat

    refuse_stray_question(context, engine)
    if options["lora"] is not None:
        options["lora"] = prepared_adapter(options["lora"], engine)
    limits = pop_options(options, LIMITS)
    run_chat(engine, limits=limits, **options)
