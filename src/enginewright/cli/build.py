"""Commands that make files from models: `engine build`, `engine rebuild`, `engine adapter` and `engine export`."""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from enginewright.cli.help import JSON_OPTION, SectionCommand, section
from enginewright.cli.options import EVERY_LINE_OPTION, QUANT_OPTIONS, QUANTS
from enginewright.cli.printing import say, show, show_report
from enginewright.cli.recipes import from_recipe, recipe_option
from enginewright.cli.values import CountType, EnginePathType, QuantType, TargetType
from enginewright.dtypes import KV_CACHES, kv_share
from enginewright.errors import UsageError
from enginewright.quant_methods import QUANT_METHODS
from enginewright.targets import CPU, PTX, SMS, parse_targets

DRAFT_QUANTS = tuple(name for name, method in QUANT_METHODS.items() if not method.calibrated)
KV_CACHE_DTYPES = {name: name for name in KV_CACHES}
KV_CACHE_DTYPES |= {"bfloat16": "bf16", "auto": "bf16", "fp8_e4m3": "fp8"}  # names of vLLM
ADAPTER_DTYPES: dict[str, Literal["bf16", "i8"]] = {"bf16": "bf16", "int8": "i8"}

# Sections of help; `engine COMMAND --help` lists them in the order in which their first options are declared.
model, form, calibration = section("Model"), section("Format"), section("Calibration")
targets_section, gate_section, output_section = section("Targets"), section("Quality gate"), section("Output")


def list_models(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Prints the model families and ends the command, if `--list-models` is given."""
    if wanted:
        from enginewright.builder.model_list import as_text

        click.echo(as_text())
        context.exit()


@click.command(cls=SectionCommand)
@click.argument("model")
@recipe_option
@model(
    "--list-models",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_models,
    help="List the model families that can be built, and exit.",
)
@model(
    "--max-seq-len",
    type=CountType(),
    show_default="the model's own limit",
    help="Longest sequence that the engine can hold, in tokens: prompt and answer together. 32k is 32768.",
)
@model(
    "--max-batch-size",
    type=CountType(),
    default=32,
    help="Batch size that the engine file records for `engine inspect`; `engine run --max-num-seqs` sets the real one.",
)
@model(
    "--draft",
    show_default="none",
    help="Draft model for speculative decoding, stored in the same engine: a smaller model of the same tokenizer, "
    "named like MODEL, for --speculate draft; the folder of an EAGLE-3 head or of Medusa heads that were trained for "
    "MODEL, for --speculate eagle or medusa; skip:8, the first 8 layers of MODEL itself, for --speculate skip; or "
    "auto, which uses the MTP layer of MODEL and makes --speculate mtp the engine's default, or ngram if MODEL has no "
    "such layer.",
)
@model(
    "--merge",
    "adapters",
    multiple=True,
    metavar="ADAPTER[:WEIGHT]",
    show_default="none",
    help="LoRA adapter to merge into the weights before they are quantized: what PEFT has saved, a folder or "
    "OWNER/NAME on the hub, or a GGUF file. The option may be given several times; a weight scales what each adds.",
)
@form(
    "--quant",
    type=QuantType(QUANTS),
    show_default="bf16; a MODEL that is quantized already keeps its format, and takes no --quant",
    help="Number format of weights and activations. bf16 and int8-wo (8-bit weights) are the closest to MODEL, w8a8 "
    "(8-bit activations as well) reads prompts faster, int4-rtn, mxfp4 and fp8 need no calibration either. int8-sq, "
    "int4-awq and int4-gptq are calibrated: more exact, in minutes. auto mixes formats to reach --bits on average.",
)
@QUANT_OPTIONS
@form(
    "--recover",
    type=CountType(),
    metavar="STEPS",
    show_default="none",
    help="Train the scales of quantized weights, and norms, on the calibration texts, so that the engine's logits come "
    "closer to those of MODEL, for at most this many steps. A step takes some seconds for each 100M parameters; 50 are "
    "a good start.",
)
@form(
    "--rotate",
    is_flag=True,
    help="Rotate hidden states and the values of attention by orthogonal matrices that go into the weights, so that "
    "no channel is an outlier. Formats of 8 and 4 bits may lose less; the quality gate says if they do. Such an engine "
    "takes no adapters, and no heads as --draft.",
)
@form(
    "--draft-quant",
    type=QuantType(DRAFT_QUANTS),
    show_default="that of MODEL, without calibration",
    help="Number format of a --draft. With fewer bits it is faster, and its tokens are accepted a little less often; "
    "answers stay the same.",
)
@form(
    "--kv-cache-dtype",
    type=click.Choice(tuple(KV_CACHE_DTYPES)),
    default="bf16",
    help="Format of the KV cache. Compared with the memory of bf16, "
    + ", ".join(f"{name} takes {kv_share(dtype):.0%}" for name, dtype in KV_CACHES.items() if name != "bf16")
    + ".",
)
@calibration(
    "--calib-data",
    show_default="texts that the model generates",
    help="Texts that calibrated methods (int8-sq, int4-awq, int4-gptq, auto) measure activations on: a file of JSON "
    "lines or plain text, or a data set of the Hugging Face hub, owner/name or owner/name:file.",
)
@calibration(
    "--calib-size",
    type=CountType(),
    show_default="32",
    help="Number of texts to calibrate with; each is cut after 128 tokens.",
)
@targets_section(
    "--target",
    "targets",
    type=TargetType(),
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
    help="Make answers on GPUs bit for bit the same, whether a request runs alone or in a batch. Prefill of long "
    "prompts is slower. Answers on CPUs are always batch-invariant.",
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
    help="Write the gate's measurements to a page (.html, with the figures in a .json file of the same name), or to a "
    ".json file.",
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
    help="Write a JSON file that says what the engine was built from, by which program and how: SLSA provenance in an "
    "in-toto Statement.",
)
@output_section(
    "--builder-id",
    show_default="this program",
    help="URI of the build platform for the provenance, for example of a CI workflow.",
)
@output_section(
    "--dry-run",
    is_flag=True,
    help="Only say what the build would write, and how much disk space and memory it would need. Nothing is downloaded "
    "or written: a model of the hub must have been downloaded before.",
)
@targets_section(
    "--tensor-parallel-size",
    "-tp",
    type=CountType(),
    default=1,
    help="Also compile kernels with which this many GPUs compute the model together, each a part of each layer. On "
    "CPUs any number of processes can without. With --dry-run, say which part each would have.",
)
@output_section(
    "--pipeline-parallel-size",
    "-pp",
    type=CountType(),
    default=1,
    help="The same for this many stages of layers, each of --tensor-parallel-size processes.",
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
    adapters: tuple[str, ...],
    max_batch_size: int,
    batch_invariant: bool,
    recover: int | None,
    rotate: bool,
    output: Path | None,
    gate: str,
    report: Path | None,
    dump_graphs: Path | None,
    provenance: Path | None,
    builder_id: str | None,
    dry_run: bool,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    draft: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Build MODEL into one engine file.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the Hugging Face hub:
    owner/name or owner/name@revision.
    """
    from enginewright.builder.build import BuildConfig, chosen_quant
    from enginewright.builder.commands import build_model
    from enginewright.builder.console import describe
    from enginewright.builder.gate import parse_gate
    from enginewright.rank_layout import RankLayout

    config = BuildConfig(
        quant=chosen_quant(quant, **settings),
        draft_quant=chosen_quant(draft_quant),
        kv_cache_dtype=KV_CACHE_DTYPES[kv_cache_dtype],
        targets=parse_targets(targets),
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        batch_invariant=batch_invariant,
        recover=recover,
        rotate=rotate,
        calib_data=calib_data,
        calib_size=calib_size,
        dump_graphs=dump_graphs,
        gate=parse_gate(gate),
        report=report,
        provenance=provenance,
        builder_id=builder_id,
    )
    requires_kv_dtype = not from_recipe("kv_cache_dtype")
    made = build_model(
        model,
        config,
        output,
        adapters=adapters,
        draft=draft,
        dry_run=dry_run,
        layout=RankLayout(tensor_parallel_size, pipeline_parallel_size),
        requires_kv_dtype=requires_kv_dtype,
    )
    show_report(made, None if as_json else describe, err=True)


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType())
@model(
    "--model",
    "source",
    show_default="searched next to ENGINE, in this folder, and in the cache of the hub",
    help="The checkpoint that ENGINE was built from: a folder, a GGUF file, or a name on the hub.",
)
@model(
    "--draft",
    show_default="searched in the same folders",
    help="The checkpoint of the draft model, or the folder of its heads, if ENGINE has one.",
)
@model(
    "--merge",
    "adapters",
    multiple=True,
    metavar="ADAPTER",
    show_default="none",
    help="Folder of an adapter that was merged into ENGINE, in the order of the build; their weights are in ENGINE.",
)
@calibration(
    "--calib-data",
    show_default="none",
    help="Texts that ENGINE was calibrated on, if it was built with --calib-data.",
)
@gate_section(
    "--evidence/--no-evidence",
    default=True,
    help="Also repeat the measurements of the quality gate. They take most of the time, and the content does not "
    "depend on them.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="not kept",
    help="Write the rebuilt engine to this file.",
)
@EVERY_LINE_OPTION
@JSON_OPTION
@click.pass_context
def rebuild(
    context: click.Context,
    engine: Path,
    source: str | None,
    draft: str | None,
    adapters: tuple[str, ...],
    calib_data: str | None,
    evidence: bool,
    output: Path | None,
    every_line: bool,
    as_json: bool,
) -> None:
    """Build ENGINE again from its inputs, and compare the two.

    The exit code is 0 if their content is the same, 1 if it differs, and 2 if an input is missing or has changed.
    """
    from enginewright.builder.commands import rebuild_engine
    from enginewright.builder.rebuild import describe

    report = rebuild_engine(
        engine,
        model=source,
        draft=draft,
        adapters=adapters,
        calib_data=calib_data,
        evidence=evidence,
        output=output,
    )
    show(report, None if as_json else partial(describe, every_line=every_line))
    context.exit(0 if report["same"] else 1)


@click.command(cls=SectionCommand)
@click.argument("adapter", metavar="ADAPTER")
@model(
    "--engine",
    required=True,
    type=EnginePathType(),
    help="The engine whose layers ADAPTER changes, built from the model that it was trained for.",
)
@output_section(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="ADAPTER.lora in this folder",
    help="The adapter file to write.",
)
@output_section(
    "--dtype",
    type=click.Choice(list(ADAPTER_DTYPES)),
    show_default="int8 for layers whose weights have at most 8 bits, bf16 for the others",
    help="The type of ADAPTER's matrices in the file.",
)
@gate_section(
    "--model",
    show_default="ADAPTER is not measured",
    help="The checkpoint that ENGINE was built from: compare ENGINE with ADAPTER to it with ADAPTER merged in fp32.",
)
@gate_section(
    "--gate",
    show_default="quick, with the limits of ENGINE's formats",
    help="Refuse ADAPTER if it is further off than these limits: quick,kl=0.05,top1=0.97.",
)
@gate_section(
    "--calib-data",
    show_default="held-out texts",
    help="Texts to compare on: a file of JSON lines or plain text, or a data set of the hub.",
)
@JSON_OPTION
def adapter(
    adapter: str,
    engine: Path,
    output: Path | None,
    dtype: str | None,
    model: str | None,
    gate: str | None,
    calib_data: str | None,
    as_json: bool,
) -> None:
    """Prepare a LoRA adapter for an engine, as a file that is ready to be loaded.

    ADAPTER is the folder that PEFT has saved, its name on the Hugging Face hub, OWNER/NAME, or a GGUF file. The result
    is for this one engine: prepare it again after a build that changes the engine's content.
    """
    from enginewright.builder.commands import prepare_adapter
    from enginewright.builder.console import describe_adapter
    from enginewright.builder.gate import parse_gate

    if model is None and (gate or calib_data):
        option = "--gate" if gate else "--calib-data"
        raise UsageError(f"{option} goes with --model", "ADAPTER is compared with the model that ENGINE was built from")
    made = prepare_adapter(
        adapter,
        engine,
        output,
        None if dtype is None else ADAPTER_DTYPES[dtype],
        model=model,
        gate=parse_gate(gate or "quick"),
        calib_data=calib_data,
    )
    show_report(made, None if as_json else describe_adapter, err=True)


@click.command(cls=SectionCommand)
@click.argument("model")
@output_section(
    "--onnx",
    "path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The ONNX file to write. Weights of more than 1 GiB go to a second file next to it, FILE.data.",
)
@output_section(
    "--dtype", type=click.Choice(("fp32", "fp16")), default="fp32", help="Format of weights and activations."
)
def export(model: str, path: Path, dtype: str) -> None:
    """Write a model as a standard ONNX file, for other runtimes.

    MODEL is the folder of a Hugging Face checkpoint, a GGUF file, or the name of a model on the hub, as for `engine
    build`.
    """
    from enginewright.builder.commands import export_model

    export_model(model, path, dtype)
    say(f"wrote {path}", err=True)
