"""The `engine` command: one function a subcommand, no logic. Heavy imports wait until a subcommand needs them."""

import json
from pathlib import Path
from typing import Any

import click

from enginewright import __version__
from enginewright.cli_options import (
    LIMIT_OPTIONS,
    LIMITS,
    QUANT_OPTIONS,
    WORKLOAD,
    WORKLOAD_OPTIONS,
    BenchCommands,
    Commands,
    Count,
    Target,
)
from enginewright.cli_recipes import recipe_option
from enginewright.errors import UsageError
from enginewright.targets import PTX, SMS, parse_targets

QUANTS = ("bf16", "int8-wo", "w8a8", "int8-sq", "int4-rtn", "int4-awq", "int4-gptq", "mxfp4", "fp8", "auto")
KV_CACHE_DTYPES = {name: name for name in ("bf16", "int8", "fp8")}
KV_CACHE_DTYPES |= {"bfloat16": "bf16", "auto": "bf16", "fp8_e4m3": "fp8"}  # vLLM's names


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
    """Builds a language model into one file, and runs that file."""


@main.command()
@click.argument("model")
@recipe_option
@click.option("--quant", type=click.Choice(QUANTS), help="Weight format.  [bf16, or the one that MODEL is in]")
@QUANT_OPTIONS
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(tuple(KV_CACHE_DTYPES)),
    default="bf16",
    show_default=True,
    help="What the KV cache holds: int8 and fp8 take half the memory.",
)
@click.option(
    "--calib-data",
    help="Texts that the method measures on: JSON lines, plain text, or a data set of the hub (owner/name:file).  "
    "[the model writes some]",
)
@click.option("--calib-size", type=Count(), help="Of which it takes so many.  [32]")
@click.option(
    "--target",
    "targets",
    type=Target(),
    multiple=True,
    default=("cpu",),
    show_default=True,
    help="What it runs on; cpu+cuda:sm_80,sm_90a is three. GPUs: " + ", ".join((*SMS, PTX)) + ".",
)
@click.option("--max-seq-len", type=Count(), help="Longest sequence, 32k is accepted.  [the model's]")
@click.option("--max-batch-size", type=Count(), default=32, show_default=True, help="Recorded as the run's default.")
@click.option(
    "--batch-invariant",
    is_flag=True,
    help="On GPUs, too, an answer has the same bits alone and in any company. Long prompts are read more slowly.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="[MODEL-QUANT.engine]")
@click.option(
    "--gate",
    default="quick",
    show_default=True,
    help="Compare engine and source: quick, full or off, and limits: kl=0.05,top1=0.97.  [limits: the method's]",
)
@click.option(
    "--report", type=click.Path(path_type=Path), help="What the gate measured: an .html file, and .json beside."
)
@click.option(
    "--dump-graphs", type=click.Path(path_type=Path, file_okay=False), help="One ONNX file a pass, no weights."
)
@click.option("--dry-run", is_flag=True, help="Say what the build would make and take, and touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def build(
    model: str,
    quant: str | None,
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
    dry_run: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Build MODEL (a folder, a .gguf file, or a hub id) into one engine file."""
    from enginewright.builder.build import BuildConfig, build_engine, chosen_quant, default_output
    from enginewright.builder.checkpoint import open_checkpoint
    from enginewright.builder.console import ConsoleProgress, describe
    from enginewright.builder.forecast import forecast
    from enginewright.builder.gate import parse_gate

    config = BuildConfig(
        quant=chosen_quant(quant, **settings),
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
    )
    with ConsoleProgress() as progress:
        progress.phase("open the checkpoint")
        checkpoint = open_checkpoint(model, only_cached=dry_run)
        path = output or default_output(checkpoint, config)
        made = (forecast if dry_run else build_engine)(checkpoint, config, path, progress)
    click.echo(json.dumps(made.to_dict()) if as_json else describe(made), err=not as_json)


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--memory", type=Count(), help="Memory to fill with sequences, e.g. 8g.  [what this machine has free]")
@click.option("--sections", is_flag=True, help="List every section.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def inspect(engine: Path, memory: int | None, sections: bool, as_json: bool) -> None:
    """Show what is in an engine file, and how many sequences of which length fit a memory."""
    from enginewright.runtime.inspect import describe, summarize

    summary = summarize(engine, memory)
    click.echo(json.dumps(summary) if as_json else describe(summary, every_section=sections))


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--goldens/--no-goldens", default=True, help="Also replay the engine's goldens on this machine.")
@click.option("--threads", type=Count(), help="Threads for the goldens.")
@click.option("--device", default="auto", help="Where the goldens run: auto, cpu, cuda.  [auto: a GPU if possible]")
@click.option("--isa", help="Instruction set for the goldens.  [the best, or ENGINEWRIGHT_CPU_ISA]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def verify(engine: Path, goldens: bool, threads: int | None, isa: str | None, device: str, as_json: bool) -> None:
    """Check every section's hash, then that the engine computes here what it computed where it was built."""
    from enginewright.runtime.verify import verify as run_verify

    report = run_verify(engine, goldens=goldens, threads=threads, isa=isa, device=device)
    click.echo(json.dumps(report) if as_json else "\n".join(f"{name:<12} {text}" for name, text in report.items()))


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--all", "every_line", is_flag=True, help="List everything, however much it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, every_line: bool, as_json: bool) -> None:
    """Say what tells the engines A and B apart; ends with 0 if their content is the same, and with 1 if not."""
    from enginewright.runtime.diff import compare, describe

    report = compare(a, b)
    click.echo(json.dumps(report) if as_json else describe(report, every_line=every_line))
    context.exit(0 if report["same"] else 1)


@main.command()
@click.argument("model")
@click.option("--onnx", "path", required=True, type=click.Path(path_type=Path, dir_okay=False), help="Where to write.")
@click.option("--dtype", type=click.Choice(("fp32", "fp16")), default="fp32", show_default=True)
def export(model: str, path: Path, dtype: str) -> None:
    """Write MODEL as a standard ONNX file, for other runtimes."""
    from enginewright.builder.checkpoint import open_checkpoint
    from enginewright.builder.export import export_onnx
    from enginewright.builder.models import build_graph

    export_onnx(build_graph(open_checkpoint(model)), path, dtype)
    click.echo(f"wrote {path}", err=True)


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", help="Text to continue, as it is.")
@click.option("-c", "--chat", help="A message to answer, through the model's chat template.")
@click.option("--system", help="System message before --chat.")
@click.option(
    "--input",
    "batch",
    type=click.Path(path_type=Path, dir_okay=False),
    help='JSON lines, each {"prompt": …} or {"messages": […]}, with sampling options if they differ.',
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines of --input.  [stdout]"
)
@click.option("--max-tokens", type=Count(), help="Tokens to write at most.  [to the model's length]")
@click.option("--temperature", type=float)
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--min-p", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--presence-penalty", type=float)
@click.option("--frequency-penalty", type=float)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-text token.")
@click.option("--logprobs", type=int, help="Log-probabilities of this many tokens at each position (--json).")
@LIMIT_OPTIONS
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def generate(
    engine: Path,
    prompt: str | None,
    chat: str | None,
    system: str | None,
    batch: Path | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Let ENGINE answer: --prompt, --chat, or a batch of JSON lines."""
    from enginewright.runtime.batch import run_batch
    from enginewright.runtime.console import print_stream
    from enginewright.runtime.llm import LLM
    from enginewright.runtime.outputs import to_dicts
    from enginewright.runtime.params import default_params

    if sum(given is not None for given in (prompt, chat, batch)) != 1:
        raise UsageError("engine generate takes one of --prompt, --chat and --input")
    limits = {name: options.pop(name) for name in LIMITS}
    sampling = {**options, "stop": options["stop"] or None}
    with LLM(engine, **limits | ({} if batch else {"max_num_seqs": 1})) as llm:
        if batch is not None:
            run_batch(llm, batch, output, sampling)
            return
        params = default_params(llm.engine, **sampling)
        messages = [{"role": "system", "content": system}] if system else []
        question = prompt if chat is None else [*messages, {"role": "user", "content": chat}]
        assert question is not None
        if as_json:
            (result,) = llm.generate(llm.encode(question), params)
            click.echo(json.dumps(to_dicts(result)[0]))
            return
        print_stream(llm, question, params, engine)


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--served-model-name", "served_model_names", multiple=True, help="What clients call it.  [the engine's]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="ENGINEWRIGHT_API_KEY",
    help="Clients need it, or one of several; better given in the variable ENGINEWRIGHT_API_KEY.",
)
@click.option("--drain-seconds", type=float, default=30.0, show_default=True, help="For what runs when told to end.")
@click.option("--max-num-waiting", type=Count(), default=1024, show_default=True, help="Requests, then 429.")
@click.option("--max-waiting-tokens", type=Count(), default="256k", show_default=True, help="Of prompts, then 429.")
@click.option(
    "--prefill-chunk-size",
    type=Count(),
    default=96,
    show_default=True,
    help="Prompt tokens in a step that also decodes, deeper ones counting for more: "
    "fewer, and streams keep their pace; more, and prompts wait less.",
)
@click.option("--verify", is_flag=True, help="Check the hashes of the weights first.")
@LIMIT_OPTIONS
def run(engine: Path, verify: bool, **options: Any) -> None:
    """Serve ENGINE behind OpenAI's API, until SIGTERM."""
    from enginewright.runtime.devices import open_engine
    from enginewright.runtime.server.config import ServerConfig
    from enginewright.runtime.server.serve import serve

    limits = {name: options.pop(name) for name in (*LIMITS, "prefill_chunk_size")}
    config = ServerConfig(**options)
    with open_engine(engine, limits["device"], verify=verify) as opened:
        serve(opened, config, **limits)


@main.group(cls=BenchCommands)
def bench() -> None:
    """Measure an engine, or a server under load."""


@bench.command("offline")
@click.argument("engine", type=click.Path(path_type=Path))
@WORKLOAD_OPTIONS
@click.option("--rounds", type=int, default=3, show_default=True, help="Times to run it all; figures are medians.")
@click.option("--warm-up", type=int, default=1, show_default=True, help="Rounds before that do not count.")
@LIMIT_OPTIONS
@click.option("--plot", type=click.Path(path_type=Path), help="Draw latencies and throughput: an .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def bench_offline(engine: Path, rounds: int, warm_up: int, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Measure how much ENGINE does when all requests are there at once."""
    from enginewright.runtime.bench.offline import OfflineConfig, run_offline
    from enginewright.runtime.bench.plot import check_plot, draw_offline
    from enginewright.runtime.bench.report import describe_offline
    from enginewright.runtime.bench.workload import workload_config

    workload = workload_config(**{name: options.pop(name) for name in WORKLOAD})
    if plot is not None:
        check_plot(plot)
    report = run_offline(engine, OfflineConfig(workload, warm_up, rounds), **options)
    click.echo(json.dumps(report.to_dict()) if as_json else describe_offline(report))
    if plot is not None:
        draw_offline(report, plot)


@bench.command("profile")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--prefill", type=Count(), multiple=True, help="Tokens of a prompt, read in one step.  [512]")
@click.option("--batch", type=Count(), multiple=True, help="Sequences that decode in a step.  [1]")
@click.option("--depth", type=Count(least=0), multiple=True, help="Positions each has in the KV cache.  [512]")
@click.option("--rounds", type=int, default=5, show_default=True, help="Each measures the roof, then every step.")
@click.option("--threads", type=Count(), help="Threads.  [all cores, or ENGINEWRIGHT_NUM_THREADS]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def bench_profile(
    engine: Path,
    prefill: tuple[int, ...],
    batch: tuple[int, ...],
    depth: tuple[int, ...],
    rounds: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show where the time of ENGINE's steps goes: kernel by kernel, beside what this machine can do at best.

    --prefill, --batch and --depth may be given several times. One of --prefill alone leaves decodes out, and the other
    two leave prompts out.
    """
    from enginewright.runtime.bench.profile import profile_config, run_profile
    from enginewright.runtime.bench.report import describe_profile

    report = run_profile(engine, profile_config(prefill, batch, depth, rounds), threads)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        click.echo(describe_profile(report), err=True)


@bench.command("serve")
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="Of an OpenAI-compatible server.")
@click.option("--endpoint", type=click.Choice(("completions", "chat")), default="completions", show_default=True)
@click.option("--model", help="Its name there.  [the first that the server has]")
@click.option("--api-key", help="For a server that wants one.")
@click.option("--request-rate", type=float, default="inf", show_default=True, help="Requests/s, at random times.")
@click.option("--max-concurrency", type=Count(), help="Requests in flight at most.")
@WORKLOAD_OPTIONS
@click.option("--vocab-size", type=Count(), default=10000, show_default=True, help="Random token ids are below it.")
@click.option("--warm-up", type=int, default=1, show_default=True, help="Requests before that do not count.")
@click.option("--goodput", help="Count requests within limits in ms, of ttft, tpot and e2e: ttft=500,tpot=50.")
@click.option("--server-pid", type=int, help="Take the CPU time of this process of the machine.")
@click.option("--timeout", "timeout_s", type=float, default=600, show_default=True, help="Seconds for a request.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw latencies and throughput: an .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def bench_serve(
    endpoint: str, vocab_size: int, goodput: str | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Put load on a server, and measure how it answers."""
    from enginewright.runtime.bench.figures import Goodput
    from enginewright.runtime.bench.plot import check_plot, draw
    from enginewright.runtime.bench.report import describe_serve
    from enginewright.runtime.bench.serving import Chat, Completions, ServeConfig, run_serve
    from enginewright.runtime.bench.workload import workload_config

    config = ServeConfig(
        workload=workload_config(**{name: options.pop(name) for name in WORKLOAD}),
        endpoint=Chat() if endpoint == "chat" else Completions(vocab_size),
        goodput=Goodput.parse(goodput) if goodput is not None else None,
        **options,
    )
    if plot is not None:
        check_plot(plot)
    report = run_serve(config)
    click.echo(json.dumps(report.to_dict()) if as_json else describe_serve(report))
    if plot is not None:
        draw(report, plot)
    report.check()


if __name__ == "__main__":
    main()
