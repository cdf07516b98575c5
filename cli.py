"""The `engine` command: one function a subcommand, no logic. Heavy imports wait until a subcommand needs them."""

import json
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import click

from enginewright import __version__
from enginewright.cli_help import JSON_OPTION, section
from enginewright.cli_options import (
    CHAT_TEMPLATE_OPTION,
    DEVICE_OPTION,
    ISA_OPTION,
    LIMIT_OPTIONS,
    LIMITS,
    QUANT_OPTIONS,
    SAMPLING_OPTIONS,
    THREADS_OPTION,
    WORKLOAD,
    WORKLOAD_OPTIONS,
    BenchCommands,
    Bytes,
    Commands,
    Count,
    EnginePath,
    JsonObject,
    Quant,
    Target,
    refuse_stray_question,
    say,
    show,
)
from enginewright.cli_recipes import from_recipe, recipe_option
from enginewright.dtypes import KV_CACHES, kv_share
from enginewright.errors import UsageError
from enginewright.input_lines import split_lines
from enginewright.output_file import require_writable
from enginewright.targets import CPU, PTX, SMS, parse_targets

QUANTS = ("bf16", "int8-wo", "w8a8", "int8-sq", "int4-rtn", "int4-awq", "int4-gptq", "mxfp4", "fp8", "auto")
DRAFT_QUANTS = ("bf16", "int8-wo", "w8a8", "int4-rtn", "mxfp4", "fp8")  # that need no calibration
KV_CACHE_DTYPES = {name: name for name in KV_CACHES}
KV_CACHE_DTYPES |= {"bfloat16": "bf16", "auto": "bf16", "fp8_e4m3": "fp8"}  # vLLM's names
RUN_LIMITS = (
    *("prefill_chunk_size", "itl_slo_ms", "kv_cache_disk", "kv_cache_dir", "grammar_memory"),
    *("kv_events", "kv_events_replay", "kv_events_topic"),
)  # of `engine run`
PROMPT_TOKENS = 256  # of an answer to --prompt without --max-tokens: a text that is continued may have no end

# Sections of help; `engine COMMAND --help` lists them in the order in which their first options are declared.
model, form, calibration = section("Model"), section("Format"), section("Calibration")
targets_section, gate_section, output_section = section("Targets"), section("Quality gate"), section("Output")
prompt_section, machine = section("Prompt"), section("Machine")
structure = section("Structure of the answer")
address, overload = section("Address"), section("Overload")
trust_section, signer_section = section("Trust"), section("Signer")
server, load, measurement = section("Server"), section("Load"), section("Measurement")

VERIFY_HELP = (
    "Check the hashes of the weights before the start, which takes about a second for 2 GiB. The hashes of all other "
    "parts of the file are always checked."
)
PLOT_OPTION = output_section(
    "--plot",
    type=click.Path(path_type=Path),
    show_default="no picture",
    help="Draw the measured latencies and throughput: an .svg or .png file.",
)


SIGNATURE_OPTION = section("Signature")(
    "--signature",
    type=click.Path(path_type=Path),
    show_default="FILE.sig, beside the file",
    help="Where the signature is.",
)


def list_models(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from enginewright.builder.model_list import as_text

        click.echo(as_text())
        context.exit()


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 120,
    },
)
@click.version_option(__version__, prog_name="engine")
def main() -> None:
    """Build a language model into one file, the engine, and run that file.

    \b
    engine build HuggingFaceTB/SmolLM2-135M-Instruct --quant int8-wo --output smollm2.engine
    engine generate smollm2.engine --chat "What is the capital of France?"
    engine chat smollm2.engine
    engine run smollm2.engine

    `engine COMMAND --help` lists the options of a command. Options may be written with underscores, numbers as 32k, and
    sizes as 2g, 2GiB or 2GB. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 model not supported, 4 not enough memory,
    5 corrupt engine file, 6 no code for this machine, 7 quality gate failed, 8 not signed by whom it has to be,
    130 ended by Ctrl-C, 143 ended by SIGTERM.
    """


@main.command()
@click.argument("model")
@recipe_option
@model(
    "--list-models",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_models,
    help="List the families of models that can be built, and end.",
)
@model(
    "--max-seq-len",
    type=Count(),
    show_default="the model's own limit",
    help="Longest sequence that the engine can hold, in tokens: prompt and answer together. 32k is 32768.",
)
@model(
    "--max-batch-size",
    type=Count(),
    default=32,
    help="Batch size that the engine file records for `engine inspect`; `engine run --max-num-seqs` sets the real one.",
)
@model(
    "--draft",
    show_default="none",
    help="What the engine holds as well, to guess what MODEL says next: a smaller model of the same tokenizer, named "
    "like MODEL, for --speculate draft; or the folder of an EAGLE-3 head or of Medusa heads that were trained for "
    "MODEL, for --speculate eagle or medusa; or skip:8, the first 8 layers of MODEL itself, for --speculate skip; or "
    "auto, which takes the MTP layer that MODEL carries and makes --speculate mtp the engine's default, or else ngram.",
)
@form(
    "--quant",
    type=Quant(QUANTS),
    show_default="bf16; a MODEL that is quantized already keeps its format, and takes no --quant",
    help="Number format of weights and activations. bf16 and int8-wo (8-bit weights) are the closest to MODEL, w8a8 "
    "(8-bit activations as well) reads prompts faster, int4-rtn, mxfp4 and fp8 need no calibration either. int8-sq, "
    "int4-awq and int4-gptq are calibrated: more exact, in minutes. auto mixes formats to reach --bits on average.",
)
@QUANT_OPTIONS
@form(
    "--draft-quant",
    type=Quant(DRAFT_QUANTS),
    show_default="that of MODEL, but for its calibration",
    help="Number format of a --draft. Fewer bits make it faster, and guesses wrong a little more often; answers stay "
    "the same.",
)
@form(
    "--kv-cache-dtype",
    type=click.Choice(tuple(KV_CACHE_DTYPES)),
    default="bf16",
    help="Format of the KV cache. Of bf16's memory "
    + ", ".join(f"{name} takes {kv_share(dtype):.0%}" for name, dtype in KV_CACHES.items() if name != "bf16")
    + ".",
)
@calibration(
    "--calib-data",
    show_default="texts that the model writes itself",
    help="Texts that calibrated methods (int8-sq, int4-awq, int4-gptq, auto) measure activations on: a file of JSON "
    "lines or plain text, or a data set of the Hugging Face hub, owner/name or owner/name:file.",
)
@calibration(
    "--calib-size",
    type=Count(),
    show_default="32",
    help="Number of texts to calibrate with; each is cut after 128 tokens.",
)
@targets_section(
    "--target",
    "targets",
    type=Target(),
    multiple=True,
    default=(CPU,),
    help="Hardware that the engine holds code for: cpu, or cuda: and GPU architectures, such as sm_80 (A100), sm_86 "
    "(RTX 30), sm_89 (RTX 40), sm_90a (H100) and sm_100a (B200). All of them: "
    f"{', '.join((*SMS, PTX))}; ptx is compiled where it runs. Join several: cpu+cuda:sm_80,sm_90a. No GPU is "
    "needed to build.",
)
@targets_section(
    "--batch-invariant",
    is_flag=True,
    help="Make answers on GPUs bit for bit the same, whether a request runs alone or in a batch. Long prompts are "
    "read more slowly. Answers on CPUs always are.",
)
@gate_section(
    "--gate",
    default="quick",
    show_default="quick, with the limits of the method",
    help="Quality gate: compare the engine with MODEL, and refuse it if it is further off than the limits allow. "
    "quick measures KL, top-1 agreement, perplexity and the errors of layers on as many texts as it needs, full on "
    "all texts, with more checks. Limits may follow: quick,kl=0.05,top1=0.97.",
)
@gate_section(
    "--report",
    type=click.Path(path_type=Path),
    show_default="no report",
    help="Write what the gate measured to a page (.html, with the figures in a .json file beside it), or to a .json "
    "file.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="MODEL-METHOD.engine in this folder",
    help="The engine file to write.",
)
@output_section(
    "--dump-graphs",
    type=click.Path(path_type=Path, file_okay=False),
    show_default="none",
    help="Folder for the model's graph after each pass of the compiler, as ONNX files without weights.",
)
@output_section(
    "--provenance",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="none",
    help="Write what the engine was built of, by what and how: a JSON file, SLSA provenance in an in-toto Statement.",
)
@output_section(
    "--builder-id",
    show_default="this program",
    help="URI of the platform that builds, for the provenance: of a CI workflow, for example.",
)
@output_section(
    "--dry-run",
    is_flag=True,
    help="Only say what the build would make, and how much disk space and memory it would need. Nothing is downloaded "
    "or written: a model of the hub must have been downloaded before.",
)
@JSON_OPTION
def build(
    model: str,
    quant: str | None,
    draft_quant: str | None,
    kv_cache_dtype: str,
    calib_data: str | None,
    calib_size: int | None,
    targets: tuple[str, ...],
    max_seq_len: int | None,
    max_batch_size: int,
    batch_invariant: bool,
    output: Path | None,
    gate: str,
    report: Path | None,
    dump_graphs: Path | None,
    provenance: Path | None,
    builder_id: str | None,
    dry_run: bool,
    draft: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Build MODEL into one engine file.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the Hugging Face hub:
    owner/name or owner/name@revision.
    """
    from enginewright.builder.build import BuildConfig, build_engine, chosen_quant, default_output, with_possible_kv
    from enginewright.builder.checkpoint import open_checkpoint
    from enginewright.builder.console import ConsoleProgress, describe
    from enginewright.builder.draft import open_draft, source_of
    from enginewright.builder.forecast import forecast
    from enginewright.builder.gate import parse_gate
    from enginewright.builder.models import check_config

    config = BuildConfig(
        quant=chosen_quant(quant, **settings),
        draft_quant=chosen_quant(draft_quant),
        kv_cache_dtype=KV_CACHE_DTYPES[kv_cache_dtype],
        targets=parse_targets(targets),
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        batch_invariant=batch_invariant,
        calib_data=calib_data,
        calib_size=calib_size,
        dump_graphs=dump_graphs,
        gate=parse_gate(gate),
        report=report,
        provenance=provenance,
        builder_id=builder_id,
    )
    with ConsoleProgress() as progress:
        progress.phase("open the checkpoint")
        checkpoint = open_checkpoint(model, only_cached=dry_run, check_config=check_config)
        beside = open_draft(draft, only_cached=dry_run, check_config=check_config) if draft else None
        if from_recipe("kv_cache_dtype"):
            other = source_of(beside)
            config = with_possible_kv(config, checkpoint.config, *([other[1].config] if other else []))
        path = output or default_output(checkpoint, config)
        made = (forecast if dry_run else build_engine)(checkpoint, config, path, progress, beside)
    if as_json:
        click.echo(json.dumps(made.to_dict()))
    else:
        say(describe(made), err=True)


@main.command()
@click.argument("engine", type=EnginePath())
@output_section(
    "--memory",
    type=Bytes(),
    show_default="what this machine has free",
    help="Say how many sequences fit this much memory, weights included: 8GiB, 8g (the same) or 8GB.",
)
@output_section("--sections", is_flag=True, help="List every section of the file, with its size and format.")
@JSON_OPTION
def inspect(engine: Path, memory: int | None, sections: bool, as_json: bool) -> None:
    """Show what is in an engine file.

    That is the model, how it was built, what the quality gate measured, and how many sequences fit into memory.
    """
    from enginewright.runtime.commands.inspect import describe, summarize

    summary = summarize(engine, memory)
    show(summary, None if as_json else partial(describe, every_section=sections))


@main.command()
@click.argument("engine", type=EnginePath())
@section("Checks")(
    "--goldens/--no-goldens",
    default=True,
    help="Also run the prompts whose results the build recorded, and compare what this machine computes.",
)
@trust_section(
    "--key",
    type=click.Path(path_type=Path),
    show_default="nobody is trusted",
    help="Public key (PEM) whose owner has to have signed ENGINE.",
)
@trust_section(
    "--certificate",
    "certificates",
    type=click.Path(path_type=Path),
    multiple=True,
    show_default="none",
    help="Root certificate (PEM) that the signer's certificate has to lead to; may be given several times.",
)
@trust_section(
    "--identity",
    show_default="none",
    help="Who has to have signed ENGINE without a key: an e-mail address, or the URL of a CI workflow.",
)
@trust_section("--issuer", show_default="none", help="URL of the OpenID provider that knows the --identity.")
@SIGNATURE_OPTION
@trust_section(
    "--provenance",
    type=click.Path(path_type=Path),
    show_default="not checked",
    help="Also check that this file, of `engine build --provenance`, is about ENGINE, and signed like it.",
)
@DEVICE_OPTION
@THREADS_OPTION
@ISA_OPTION
@JSON_OPTION
def verify(
    engine: Path,
    goldens: bool,
    key: Path | None,
    certificates: tuple[Path, ...],
    identity: str | None,
    issuer: str | None,
    signature: Path | None,
    provenance: Path | None,
    threads: int | None,
    isa: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Check that an engine file is intact, and whom it is from.

    The hash of every part of the file is checked, weights included, and the signature if you name whom you trust.
    Then the engine is run, to see whether it computes on this machine what it computed where it was built.
    """
    from enginewright.runtime.commands.signing import choose_trust
    from enginewright.runtime.commands.verify import verify as run_verify

    report = run_verify(
        engine,
        goldens=goldens,
        threads=threads,
        isa=isa,
        device=device,
        trust=choose_trust(key, certificates, identity, issuer),
        signature=signature,
        provenance=provenance,
    )
    show(report, None if as_json else lambda one: "\n".join(f"{name:<12} {text}" for name, text in one.items()))


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@signer_section(
    "--key",
    type=click.Path(path_type=Path),
    show_default="none",
    help="Private key (PEM, on the curve P-256, P-384 or P-521, without a password) to sign with.",
)
@signer_section(
    "--certificate",
    type=click.Path(path_type=Path),
    show_default="the key alone",
    help="Certificate (PEM) of the key, for whoever trusts its root.",
)
@signer_section(
    "--chain",
    type=click.Path(path_type=Path),
    multiple=True,
    show_default="none",
    help="Certificate (PEM) between that and the root; may be given several times.",
)
@signer_section(
    "--keyless",
    is_flag=True,
    help="Sign as the CI job that this is, or as whoever logs in on the web page that opens, with a certificate of "
    "Sigstore. What is signed, and by whom, is then in a public log.",
)
@SIGNATURE_OPTION
@JSON_OPTION
def sign(
    file: Path,
    key: Path | None,
    certificate: Path | None,
    chain: tuple[Path, ...],
    keyless: bool,
    signature: Path | None,
    as_json: bool,
) -> None:
    """Sign FILE, an engine or its provenance.

    The signature is a Sigstore bundle as OpenSSF Model Signing has it: a file of its own, which leaves FILE as it is.
    """
    from enginewright.runtime.commands.signing import choose_signer
    from enginewright.runtime.commands.signing import sign as run_sign

    written = run_sign(file, choose_signer(key, certificate, chain, keyless), signature)
    report = {"file": str(file), "signature": str(written)}
    show(report, None if as_json else lambda one: f"signed {one['file']}: {one['signature']}")


@main.command()
@click.argument("engine", type=EnginePath(), required=False)
@LIMIT_OPTIONS
@JSON_OPTION
@click.pass_context
def doctor(context: click.Context, /, engine: Path | None, as_json: bool, **limits: Any) -> None:
    """Show what this machine has, and what ENGINE would do on it.

    Nothing is run. The exit code is 0, and 1 if the engine cannot run here; warnings say what makes it slow.
    """
    from enginewright.runtime.api.vllm_options import runtime_config
    from enginewright.runtime.commands.doctor import describe, examine

    report = examine(engine, runtime_config(**limits))
    show(report, None if as_json else describe)
    context.exit(1 if report["problems"] else 0)


@main.command()
@click.argument("a", type=EnginePath())
@click.argument("b", type=EnginePath())
@output_section("--all", "every_line", is_flag=True, help="List every difference; long lists are cut short otherwise.")
@JSON_OPTION
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, every_line: bool, as_json: bool) -> None:
    """Compare two engine files, A and B.

    The exit code is 0 if their content is the same, and 1 if it differs.
    """
    from enginewright.runtime.commands.diff import compare, describe

    report = compare(a, b)
    show(report, None if as_json else partial(describe, every_line=every_line))
    context.exit(0 if report["same"] else 1)


@main.command()
@click.argument("engine", type=EnginePath())
@model(
    "--model",
    "source",
    show_default="looked for beside ENGINE, here, and in the cache of the hub",
    help="The checkpoint that ENGINE was built of: a folder, a GGUF file, or a name on the hub.",
)
@model(
    "--draft",
    show_default="looked for in the same places",
    help="The checkpoint of the smaller model beside it, or the folder of its heads, where ENGINE has one.",
)
@calibration(
    "--calib-data",
    show_default="none",
    help="Texts that ENGINE was calibrated on, where it was built with --calib-data.",
)
@gate_section(
    "--evidence/--no-evidence",
    default=True,
    help="Also measure again what the quality gate has measured. It takes the longest, and the content does not depend "
    "on it.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="not kept",
    help="Keep the engine that is made.",
)
@output_section("--all", "every_line", is_flag=True, help="List every difference; long lists are cut short otherwise.")
@JSON_OPTION
@click.pass_context
def rebuild(
    context: click.Context,
    engine: Path,
    source: str | None,
    draft: str | None,
    calib_data: str | None,
    evidence: bool,
    output: Path | None,
    every_line: bool,
    as_json: bool,
) -> None:
    """Make ENGINE again from what it was built of, and compare the two.

    The exit code is 0 if their content is the same, 1 if it differs, and 2 if an input is missing or has changed.
    """
    from enginewright.builder.console import ConsoleProgress
    from enginewright.builder.rebuild import describe
    from enginewright.builder.rebuild import rebuild as run_rebuild

    with ConsoleProgress() as progress:
        report = run_rebuild(
            engine,
            progress,
            model=source,
            draft=draft,
            calib_data=calib_data,
            evidence=evidence,
            output=output,
        )
    show(report, None if as_json else partial(describe, every_line=every_line))
    context.exit(0 if report["same"] else 1)


@main.command()
@click.argument("model")
@output_section(
    "--onnx",
    "path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The ONNX file to write. Weights of more than 1 GiB go to a second file beside it, FILE.data.",
)
@output_section(
    "--dtype", type=click.Choice(("fp32", "fp16")), default="fp32", help="Format of weights and activations."
)
def export(model: str, path: Path, dtype: str) -> None:
    """Write a model as a standard ONNX file, for other runtimes.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub, as for `engine
    build`.
    """
    from enginewright.builder.checkpoint import open_checkpoint
    from enginewright.builder.export import export_onnx
    from enginewright.builder.models import build_graph, check_config

    require_writable(path, regular=True)  # before anything is downloaded
    export_onnx(build_graph(open_checkpoint(model, check_config=check_config)), path, dtype)
    say(f"wrote {path}", err=True)


@main.command(context_settings={"allow_extra_args": True})  # to say what a stray question needs
@click.argument("engine", type=EnginePath())
@prompt_section("-p", "--prompt", show_default="none", help="A text that the model continues, as it stands.")
@prompt_section(
    "-c", "--chat", show_default="none", help="A message that the model answers, put into its chat template."
)
@prompt_section("--system", show_default="none", help="A system message that stands before the message of --chat.")
@CHAT_TEMPLATE_OPTION
@prompt_section(
    "--input",
    "batch",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="none",
    help='Answer a file of requests in one batch. Each line is {"prompt": …} or {"messages": […]}, with an "id" and '
    "sampling options if they differ, or OpenAI's batch form.",
)
@SAMPLING_OPTIONS
@structure(
    "--json-schema",
    type=JsonObject(),
    show_default="none",
    help='The answer is JSON that follows this schema: \'{"type": "object", …}\', or "$(cat FILE)".',
)
@structure("--json-object", is_flag=True, default=None, help="The answer is a JSON object.")
@structure("--regex", show_default="none", help="The whole answer matches this regular expression.")
@structure(
    "--choice",
    multiple=True,
    show_default="none",
    help="The answer is this text, or another one of those that the option, given several times, names.",
)
@structure(
    "--grammar",
    show_default="none",
    help='The answer follows this grammar, in Lark or llama.cpp\'s GBNF: "$(cat FILE)".',
)
@output_section(
    "--max-tokens",
    type=Count(),
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
    help="Also give log-probabilities: of each token, and of this many of the likeliest ones in its place (0 to 20). "
    "Needs --json or --input.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="stdout",
    help="File for the answers to --input: JSON lines, in the order of the requests. Each is written as soon as those "
    "before it are.",
)
@output_section(
    "--resume",
    is_flag=True,
    help="Go on with an --output that an earlier run has not finished: its answers are kept, and requests whose id "
    "they have are not asked again.",
)
@JSON_OPTION
@LIMIT_OPTIONS
@machine("--verify", is_flag=True, help=VERIFY_HELP)
@click.pass_context
def generate(
    context: click.Context,
    /,
    engine: Path,
    prompt: str | None,
    chat: str | None,
    system: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    batch: Path | None,
    output: Path | None,
    resume: bool,
    verify: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Let an engine answer one question, or a file of them.

    ENGINE is a file that `engine build` wrote. Give one of --prompt, --chat and --input.
    """
    from enginewright.runtime.api.llm import LLM
    from enginewright.runtime.commands.batch import run_batch
    from enginewright.runtime.commands.console import print_json, print_stream
    from enginewright.runtime.core.params import default_params
    from enginewright.runtime.core.prompts import Conversation
    from enginewright.runtime.device.devices import open_engine
    from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams

    refuse_stray_question(context, engine)
    if sum(given is not None for given in (prompt, chat, batch)) != 1:
        raise UsageError("engine generate takes one of --prompt, --chat and --input", fix='Ask with --chat "…".')
    if system is not None and chat is None:
        fix = "Ask with --chat." if batch is None else 'Put it into "messages", with the role "system".'
        raise UsageError("--system goes with --chat alone", "it is a message of a conversation", fix)
    if chat_template_kwargs is not None and chat is None:
        raise UsageError("--chat-template-kwargs goes with --chat alone", "other prompts have no chat template")
    if options["logprobs"] is not None and not (as_json or batch):
        raise UsageError("--logprobs needs --json", "the answer's text alone is printed without it", "Add --json.")
    if output is not None and batch is None:
        raise UsageError(
            "--output goes with --input", "an answer to --prompt or --chat is printed", "Redirect it: > FILE"
        )
    if resume and output is None:
        raise UsageError("--resume goes with --output", "it goes on with a file of answers", "Name the file with -o.")
    limits = {name: options.pop(name) for name in LIMITS}
    structure = {"json": options.pop("json_schema"), "choice": options.pop("choice") or None}
    structure |= {name: options.pop(name) for name in ("json_object", "regex", "grammar")}
    sampling = {**options, "stop": options["stop"] or None}
    if any(value is not None for value in structure.values()):
        sampling["structured_outputs"] = StructuredOutputsParams(**structure)
    limits |= {} if batch else {"max_num_seqs": 1}
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        if batch is not None:
            run_batch(llm, batch, output, sampling, resume=resume)
            return
        default_limit = PROMPT_TOKENS if prompt is not None and sampling["max_tokens"] is None else None
        params = default_params(llm.engine, **sampling | ({"max_tokens": default_limit} if default_limit else {}))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": chat})
        conversation = Conversation(messages, template_kwargs=chat_template_kwargs or {})
        question = conversation if prompt is None else prompt
        if as_json:
            print_json(llm, question, params, default_limit=default_limit)
        else:
            print_stream(llm, question, params, engine, default_limit=default_limit)


@main.command()
@click.argument("engine", type=EnginePath())
@click.argument("texts", nargs=-1)
@prompt_section(
    "-i",
    "--input",
    "lines",
    type=click.File("rb"),
    show_default="none",
    help="File with a text in each line, behind those of the command line; - is standard input.",
)
@prompt_section("--prompt-name", show_default="the model's own", help="Which of the model's prompts texts begin with.")
@prompt_section(
    "--truncate-prompt-tokens",
    type=int,
    show_default="longer texts are refused",
    help="Number of tokens that are kept of a longer text; -1 is as many as fit.",
)
@output_section(
    "--dimensions",
    type=Count(),
    show_default="all",
    help="Numbers of a vector, where the model can do with fewer.",
)
@LIMIT_OPTIONS
@machine("--verify", is_flag=True, help=VERIFY_HELP)
def embed(
    engine: Path,
    texts: tuple[str, ...],
    lines: BinaryIO | None,
    prompt_name: str | None,
    truncate_prompt_tokens: int | None,
    dimensions: int | None,
    verify: bool,
    **limits: Any,
) -> None:
    """Print the vectors of texts: a line of JSON for each.

    ENGINE is a file that `engine build` wrote from an embedding model.
    """
    from enginewright.runtime.api.llm import LLM
    from enginewright.runtime.device.devices import open_engine

    given = [*texts, *((line.decode() for line in split_lines(lines.read(), lines.name)) if lines else ())]
    if not given:
        raise UsageError("engine embed takes texts", fix='Write them behind the engine: "…", or use --input.')
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        outputs = llm.embed(
            given, dimensions=dimensions, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
        )
        for text, output in zip(given, outputs, strict=True):
            fields = {"text": text, "embedding": output.outputs.embedding}
            click.echo(json.dumps(fields | {"num_prompt_tokens": len(output.prompt_token_ids)}, ensure_ascii=False))


@main.command(context_settings={"allow_extra_args": True})  # to say what a stray question needs
@click.argument("engine", type=EnginePath())
@prompt_section("--system", show_default="none", help="A system message that stands before the conversation.")
@CHAT_TEMPLATE_OPTION
@prompt_section(
    "--no-thinking",
    is_flag=True,
    help="Let a model answer at once that may think before: enable_thinking is false in its chat template.",
)
@SAMPLING_OPTIONS
@output_section(
    "--max-tokens", type=Count(), show_default="up to --max-model-len", help="Maximum number of tokens in an answer."
)
@LIMIT_OPTIONS
@machine("--verify", is_flag=True, help=VERIFY_HELP)
@click.pass_context
def chat(
    context: click.Context,
    /,
    engine: Path,
    system: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    no_thinking: bool,
    max_tokens: int | None,
    verify: bool,
    **options: Any,
) -> None:
    """Talk to an engine on the terminal.

    ENGINE is a file that `engine build` wrote. Ctrl-C stops an answer, Ctrl-D ends the conversation, and /help lists
    the commands. What comes through a pipe is a message a line, and answers alone are on stdout.
    """
    from enginewright.runtime.api.llm import LLM
    from enginewright.runtime.commands.terminal_chat import TerminalChat, without_thinking
    from enginewright.runtime.core.params import default_params
    from enginewright.runtime.device.devices import open_engine

    refuse_stray_question(context, engine)
    limits = {name: options.pop(name) for name in LIMITS} | {"max_num_seqs": 1}
    with open_engine(engine, limits["device"], verify=verify) as opened, LLM(opened, **limits) as llm:
        names = chat_template_kwargs or {}
        if no_thinking:
            names = without_thinking(llm.get_tokenizer(), names)
        params = default_params(opened, max_tokens=max_tokens, **options)
        TerminalChat(llm, params, system=system, template_kwargs=names).run()


@main.command()
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...", type=EnginePath())
@model(
    "--quant",
    type=Quant(QUANTS),
    show_default="the closest to MODEL whose weights fit the memory, of those for this machine",
    help="Number format of weights and activations where a MODEL is built.",
)
@model("--rebuild", is_flag=True, help="Build a MODEL also where the cache has its engine.")
@address("--host", default="127.0.0.1", help="Address to listen on. 0.0.0.0 takes connections from other machines.")
@address("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 takes one that is free.")
@address(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    show_default="the name in the engine file, and that of the file",
    help="Name of the model in the API. The option may be given several times; each name is accepted.",
)
@address(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    show_default="on a loopback address its own names, otherwise any",
    help="A name that requests may have in their Host header. The option may be given several times.",
)
@address(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    show_default="none",
    help="A site whose web pages may use the server from a browser (CORS), such as https://chat.example.com. The "
    "option may be given several times.",
)
@address(
    "--ssl-certfile",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="no TLS",
    help="Serve HTTPS with this certificate: a PEM file, with the chain behind it. SIGHUP reads it again.",
)
@address(
    "--ssl-keyfile",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="in --ssl-certfile",
    help="The certificate's private key, a PEM file without a password.",
)
@address(
    "--tool-call-parser",
    metavar="NAME",
    show_default="the one that the model's chat template tells",
    help="How the model writes calls of tools: hermes, qwen3_xml, llama3_json, mistral, …; a wrong name lists all.",
)
@address("--page/--no-page", default=True, help="Serve a page with a chat and charts at /.")
@LIMIT_OPTIONS
@section("Several engines")(
    "--memory",
    type=Bytes(),
    show_default="what this machine has free",
    help="Memory that open engines may take together: weights, activations and KV caches.",
)
@section("Several engines")(
    "--idle-seconds",
    type=float,
    show_default="never",
    help="Close an engine that no request has used for this long.",
)
@section("Limits")(
    "--prefill-chunk-size",
    type=Count(),
    default=96,
    help="Maximum number of prompt tokens in a step that also writes answers; steps without answers take "
    "--max-num-batched-tokens. Smaller values keep the pace of running answers steady, larger ones make new requests "
    "wait less.",
)
@section("Limits")(
    "--itl-slo-ms",
    type=Count(),
    show_default="none: --prefill-chunk-size alone holds",
    help="Goal for the milliseconds between two tokens of an answer. Prompts are then read as fast as the steps that "
    "were measured allow.",
)
@section("Limits")(
    "--kv-cache-disk",
    type=Bytes(),
    show_default="nothing is kept",
    help="Size on disk for what falls out of the KV cache: beginnings of prompts are read from there instead of being "
    "computed anew, also by the next process.",
)
@section("Limits")(
    "--kv-cache-dir",
    type=click.Path(file_okay=False),
    show_default="kv in the folder of caches, $XDG_CACHE_HOME/enginewright",
    help="Folder for it; one in /dev/shm keeps it in memory. Whoever reads it can learn what was asked and answered.",
)
@section("Limits")(
    "--grammar-memory",
    type=Bytes(),
    default="256m",
    help="Maximum memory of an engine for compiled grammars of structured answers, 64m or more. A grammar may take a "
    "quarter of it; those that were unused for longest go first.",
)
@overload(
    "--max-num-waiting",
    type=Count(),
    default=1024,
    help="Maximum number of answers that wait for their first token, beyond those in the batch. More are refused with "
    "status 429.",
)
@overload(
    "--max-waiting-tokens",
    type=Count(),
    default="256k",
    help="Maximum number of prompt tokens that wait, over all requests. More are refused with status 429.",
)
@overload(
    "--max-logprobs-memory",
    type=Bytes(),
    default="1g",
    help="Maximum memory for the log-probabilities of all running requests: 1g is 1 GiB. A request that would "
    "exceed it gets status 429, and 400 if it could never fit.",
)
@overload(
    "--responses-store",
    type=Count(0),
    default=1000,
    help="Maximum number of responses kept for GET /v1/responses/ID and previous_response_id; the least recently used "
    "go first. 0 keeps none.",
)
@overload(
    "--responses-memory",
    type=Bytes(),
    default="256m",
    help="Maximum memory for the kept responses and the conversations before them.",
)
@overload(
    "--max-connections",
    type=Count(),
    show_default="as many as the limit of open files allows, 4096 at most",
    help="Maximum number of open connections. More are refused with status 503.",
)
@overload(
    "--step-timeout",
    type=float,
    default=60.0,
    help="Seconds after which a step of the engine that does not end makes /health fail and new requests get status "
    "503; 0 turns this off.",
)
@overload(
    "--drain-seconds",
    type=float,
    default=30.0,
    help="On SIGTERM or Ctrl-C, how many seconds running and waiting requests may take to finish.",
)
@section("Operation")(
    "--strict-keys",
    is_flag=True,
    help="Refuse requests with keys, or types of tools, that this server does not know. Otherwise these are left out, "
    "and named in the header X-Enginewright-Warning and in the log.",
)
@section("Operation")(
    "--metrics-compat",
    type=click.Choice(("vllm",)),
    show_default="our names alone",
    help="Let /metrics have the names of another server, too: dashboards, routers and autoscalers made for it work.",
)
@section("KV events")(
    "--kv-events",
    metavar="ADDRESS",
    show_default="none are sent",
    help="ZeroMQ address where routers learn which blocks the prefix cache has, in vLLM's messages: tcp://*:5557 "
    "listens, tcp://router:5557 connects. Whoever can connect reads the tokens of all prompts.",
)
@section("KV events")(
    "--kv-events-replay",
    metavar="ADDRESS",
    show_default="none",
    help="ZeroMQ address to listen on, where they ask again for messages that they have missed.",
)
@section("KV events")("--kv-events-topic", metavar="TEXT", default="", show_default="empty", help="Topic of messages.")
@section("Operation")(
    "--otlp-traces-endpoint",
    metavar="URL",
    show_default="no traces",
    help="Send a span for each request to this collector of OpenTelemetry's, by OTLP over HTTP: "
    "http://127.0.0.1:4318/v1/traces.",
)
@section("Keys")(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="ENGINEWRIGHT_API_KEY",
    show_default="ENGINEWRIGHT_API_KEY, or no key is needed",
    help="A key that clients have to send. The option may be given several times; any of the keys will do. The "
    "variable ENGINEWRIGHT_API_KEY (several keys separated by spaces) is safer: other users of the machine can see "
    "the options of a command.",
)
@section("Log")(
    "--log-level",
    type=click.Choice(("error", "warning", "info", "debug")),
    default="info",
    help="What is logged on stderr; info is a line for each request, and one for the throughput every ten seconds of "
    "work.",
)
@section("Log")(
    "--log-format", type=click.Choice(("text", "json")), default="text", help="Form of each line of the log."
)
@machine("--verify", is_flag=True, help=VERIFY_HELP)
def run(
    engines: tuple[Path, ...],
    quant: str | None,
    rebuild: bool,
    verify: bool,
    log_level: str,
    log_format: str,
    **options: Any,
) -> None:
    """Serve engines over HTTP, with OpenAI's API and Anthropic's.

    ENGINE is a file that `engine build` wrote, or a folder of such files. Of several, each is opened when a request
    names it, and closed when its memory is wanted. It may also be a MODEL, as for `engine build`: its engine is then
    built once, and kept in the cache. The server runs until SIGTERM or Ctrl-C.
    """
    from enginewright.builder.model_cache import engine_files
    from enginewright.runtime.server.config import ServerConfig
    from enginewright.runtime.server.log import STDERR, log_to
    from enginewright.runtime.server.serve import serve

    limits = {name: options.pop(name) for name in (*LIMITS, *RUN_LIMITS)}
    config = ServerConfig(**options)
    files = engine_files(engines, quant=quant, device=limits["device"], memory=config.memory, rebuild=rebuild)
    with log_to(STDERR, log_level, log_format) as announce:
        serve(files, config, announce=announce, verify=verify, **limits)


@main.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print what lets SHELL complete commands and options.

    \b
    bash: eval "$(engine completion bash)" in ~/.bashrc
    zsh:  eval "$(engine completion zsh)" in ~/.zshrc
    fish: engine completion fish > ~/.config/fish/completions/engine.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "engine", "_ENGINE_COMPLETE").source())


@main.command("help")
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as `engine COMMAND --help` does."""
    assert context.parent is not None
    command, shown = context.parent.command, context.parent
    for word in words:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{shown.command_path} has no commands of its own.", context)
        name, found, _ = command.resolve_command(shown, [word])
        assert found is not None
        command, shown = found, click.Context(found, shown, name)
    click.echo(command.get_help(shown))


@main.group(cls=BenchCommands)
def bench() -> None:
    """Measure the speed of an engine or a server."""


@bench.command("offline")
@click.argument("engine", type=EnginePath())
@WORKLOAD_OPTIONS
@measurement("--rounds", type=int, default=3, help="How often the requests are run. Rates are medians over the rounds.")
@measurement("--warm-up", type=int, default=1, help="Rounds that are run before these and do not count.")
@measurement(
    "--compare",
    is_flag=True,
    help="Run each round without guesses, too, beside the one with --speculate, and say how much faster guesses are "
    "and how many answers are the same.",
)
@LIMIT_OPTIONS
@PLOT_OPTION
@JSON_OPTION
def bench_offline(
    engine: Path, rounds: int, warm_up: int, compare: bool, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Measure the throughput of an engine that has all requests at once."""
    from enginewright_bench.offline import OfflineConfig, run_offline
    from enginewright_bench.plot import check_plot, draw_offline
    from enginewright_bench.report import describe_offline
    from enginewright_bench.workload import workload_config

    workload = workload_config(**{name: options.pop(name) for name in WORKLOAD})
    if plot is not None:
        check_plot(plot)
    report = run_offline(engine, OfflineConfig(workload, warm_up, rounds, compare), **options)
    say(json.dumps(report.to_dict()) if as_json else describe_offline(report))
    if plot is not None:
        draw_offline(report, plot)


@bench.command("profile")
@click.argument("engine", type=EnginePath())
@section("Steps")(
    "--prefill",
    type=Count(),
    multiple=True,
    show_default="512",
    help="Profile a step that reads a prompt of this many tokens. The option may be given several times.",
)
@section("Steps")(
    "--batch",
    type=Count(),
    multiple=True,
    show_default="1",
    help="Profile a step in which this many sequences decode one token each. The option may be given several times.",
)
@section("Steps")(
    "--depth",
    type=Count(least=0),
    multiple=True,
    show_default="512",
    help="Number of tokens that each of these sequences already has in the KV cache. The option may be given several "
    "times.",
)
@measurement(
    "--rounds", type=int, default=5, help="How often to measure. Each round measures the roofline, then every step."
)
@THREADS_OPTION
@JSON_OPTION
def bench_profile(
    engine: Path,
    prefill: tuple[int, ...],
    batch: tuple[int, ...],
    depth: tuple[int, ...],
    rounds: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show which kernels the time of a step goes to, beside the machine's roofline.

    With --prefill alone only prompts are profiled, with --batch or --depth alone only decoding. Every --batch is
    profiled at every --depth.
    """
    from enginewright_bench.profile import profile_config, run_profile
    from enginewright_bench.report import describe_profile

    report = run_profile(engine, profile_config(prefill, batch, depth, rounds), threads)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        say(describe_profile(report), err=True)


@bench.command("serve")
@server("--base-url", default="http://127.0.0.1:8000", help="Address of a server with OpenAI's API: ours or another.")
@server(
    "--endpoint",
    type=click.Choice(("completions", "chat")),
    default="completions",
    help="Which API to use. completions sends token ids, so that prompts have exactly the length that is asked for.",
)
@server("--model", show_default="the first one that the server lists", help="Name of the model on the server.")
@server("--api-key", show_default="none", help="Key that the server wants.")
@load(
    "--request-rate",
    type=float,
    default="inf",
    help="Requests per second on average, sent at random times (a Poisson process); inf sends all at once.",
)
@load(
    "--max-concurrency",
    type=Count(),
    show_default="no limit",
    help="Maximum number of requests that are in flight at the same time.",
)
@WORKLOAD_OPTIONS
@section("Requests")(
    "--vocab-size", type=Count(), default=10000, help="Random prompts use token ids below this number."
)
@measurement("--warm-up", type=int, default=1, help="Requests that are sent before the others and do not count.")
@measurement(
    "--goodput",
    show_default="not counted",
    help="Count the requests that stay within limits in milliseconds: ttft (time to first token), tpot (time per "
    "output token), e2e (whole answer). Example: ttft=500,tpot=50.",
)
@measurement(
    "--server-pid",
    type=int,
    show_default="not measured",
    help="Also measure the CPU time of the server, the process with this id on this machine.",
)
@measurement("--timeout", "timeout_s", type=float, default=600, help="Seconds after which a request counts as failed.")
@PLOT_OPTION
@JSON_OPTION
def bench_serve(
    endpoint: str, vocab_size: int, goodput: str | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Send requests to a server, and measure how fast it answers."""
    from enginewright_bench.figures import Goodput
    from enginewright_bench.plot import check_plot, draw
    from enginewright_bench.report import describe_serve
    from enginewright_bench.serving import Chat, Completions, ServeConfig, run_serve
    from enginewright_bench.workload import workload_config

    config = ServeConfig(
        workload=workload_config(**{name: options.pop(name) for name in WORKLOAD}),
        endpoint=Chat() if endpoint == "chat" else Completions(vocab_size),
        goodput=Goodput.parse(goodput) if goodput is not None else None,
        **options,
    )
    if plot is not None:
        check_plot(plot)
    report = run_serve(config)
    say(json.dumps(report.to_dict()) if as_json else describe_serve(report))
    if plot is not None:
        draw(report, plot)
    report.check()


if __name__ == "__main__":
    main()
