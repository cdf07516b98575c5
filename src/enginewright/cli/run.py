"""The command `engine run`: a server for one engine or several."""

from pathlib import Path
from typing import Any

import click

from enginewright.cli.help import SectionCommand, section
from enginewright.cli.options import LIMIT_OPTIONS, LIMITS, QUANTS, VERIFY_OPTION, pop_options
from enginewright.cli.values import Bytes, Count, EnginePath, Quant

RUN_LIMITS = (
    *("prefill_chunk_size", "itl_slo_ms", "kv_cache_disk", "kv_cache_dir", "grammar_memory"),
    *("kv_events", "kv_events_replay", "kv_events_topic"),
)  # fields of RuntimeConfig that are options of `engine run` alone

model, address, overload = section("Model"), section("Address"), section("Overload")


@click.command(cls=SectionCommand)
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
@VERIFY_OPTION
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

    limits = pop_options(options, (*LIMITS, *RUN_LIMITS))
    config = ServerConfig(**options)
    files = engine_files(engines, quant=quant, device=limits["device"], memory=config.memory, rebuild=rebuild)
    with log_to(STDERR, log_level, log_format) as announce:
        serve(files, config, announce=announce, verify=verify, **limits)
