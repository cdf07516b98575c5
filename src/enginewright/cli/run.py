"""The command `engine run`: a server for one engine or several."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from enginewright.cli.help import SectionCommand, section
from enginewright.cli.options import (
    LIMIT_OPTIONS,
    LIMITS,
    LOG_OPTIONS,
    QUANTS,
    VERIFY_OPTION,
    hosting_options,
    pop_options,
)
from enginewright.cli.values import BytesType, CountType, EnginePathType, QuantType
from enginewright.runtime.config import KV_ROLES

RUN_LIMITS = (
    *("prefill_chunk_size", "itl_slo_ms", "kv_cache_disk", "kv_cache_dir", "grammar_memory"),
    *("kv_cache_remote", "kv_cache_share", "kv_cache_listen"),
    *("kv_events", "kv_events_replay", "kv_events_topic", "kv_role", "kv_listen", "kv_secret_file"),
    *("max_loras", "max_lora_rank", "max_cpu_loras"),
)  # fields of RuntimeConfig that are options of `engine run` alone

model, address, overload, adapters = section("Model"), section("Address"), section("Overload"), section("Adapters")


@click.command(cls=SectionCommand)
@click.argument("engines", nargs=-1, required=True, metavar="ENGINE...", type=EnginePathType())
@model(
    "--quant",
    type=QuantType(QUANTS),
    show_default="the closest to MODEL among the formats of this machine whose weights fit into memory",
    help="Number format of weights and activations, if a MODEL is built.",
)
@model("--rebuild", is_flag=True, help="Build a MODEL even if the cache has its engine.")
@hosting_options(port=8000)
@address(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    show_default="the name in the engine file, and that of the file",
    help="Name of the model in the API. The option may be given several times; each name is accepted.",
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
    "--tool-call-parser",
    metavar="NAME",
    show_default="detected from the chat template",
    help="Format of the model's tool calls: hermes, qwen3_xml, llama3_json, mistral, …; an unknown name lists all.",
)
@address("--page/--no-page", default=True, help="Serve a web page with a chat and charts at /.")
@LIMIT_OPTIONS
@section("Several engines")(
    "--memory",
    type=BytesType(),
    show_default="what this machine has free",
    help="Maximum memory of all open engines together: weights, activations and KV caches.",
)
@section("Several engines")(
    "--idle-seconds",
    type=float,
    show_default="never",
    help="Close an engine that no request has used for this long.",
)
@adapters(
    "--lora-modules",
    multiple=True,
    metavar="NAME=ADAPTER",
    show_default="none",
    help="An adapter that requests may name as their model: a file that `engine adapter` made, or, with one engine, "
    "what PEFT has saved, a folder or OWNER/NAME on the hub, or a GGUF file. The option may be given several times. "
    "With several engines, the model is ENGINE:NAME.",
)
@adapters(
    "--lora-dir",
    type=click.Path(file_okay=False),
    show_default="none",
    help="Folder of adapters: each file NAME.lora is one, also if it comes later. It is opened by the first request "
    "that names it.",
)
@adapters(
    "--enable-lora-updates",
    is_flag=True,
    help="Let the holders of an --admin-key add and remove adapters of --lora-dir by POST /v1/load_lora_adapter and "
    "/v1/unload_lora_adapter.",
)
@adapters(
    "--max-loras",
    type=CountType(),
    show_default="--max-num-seqs",
    help="Maximum number of adapters in one step. A sequence with another one waits.",
)
@adapters(
    "--max-lora-rank",
    type=CountType(),
    default=64,
    help="Maximum rank of an adapter; memory for activations grows with it.",
)
@adapters(
    "--max-cpu-loras",
    type=CountType(),
    default=256,
    help="Maximum number of adapters that stay open; the least recently used are closed first.",
)
@section("Limits")(
    "--prefill-chunk-size",
    type=CountType(),
    default=96,
    help="Maximum number of prompt tokens in a step that also decodes; steps that only prefill take "
    "--max-num-batched-tokens. Smaller values keep the pace of running answers steady, larger ones shorten the wait of "
    "new requests.",
)
@section("Limits")(
    "--itl-slo-ms",
    type=CountType(),
    show_default="none: only --prefill-chunk-size applies",
    help="Goal for the milliseconds between two tokens of an answer. Prompts are then read as fast as the "
    "measured durations of steps allow.",
)
@section("Limits")(
    "--kv-cache-disk",
    type=BytesType(),
    show_default="nothing is kept",
    help="Size of the disk cache for blocks that are evicted from the KV cache: prefixes of prompts are read from it "
    "instead of being computed again, also by the next process.",
)
@section("Limits")(
    "--kv-cache-dir",
    type=click.Path(file_okay=False),
    show_default="$XDG_CACHE_HOME/enginewright/kv",
    help="Folder of the disk cache; one in /dev/shm keeps it in memory. Its files reveal prompts and answers.",
)
@section("Limits")(
    "--grammar-memory",
    type=BytesType(),
    default="256m",
    help="Maximum memory of an engine for compiled grammars of structured answers, 64m or more. A grammar may take a "
    "quarter of it; the least recently used ones are dropped first.",
)
@overload(
    "--max-num-waiting",
    type=CountType(),
    default=1024,
    help="Maximum number of answers that wait for their first token, beyond those in the batch. More are refused with "
    "status 429.",
)
@overload(
    "--max-waiting-tokens",
    type=CountType(),
    default="256k",
    help="Maximum number of prompt tokens that wait, over all requests. More are refused with status 429.",
)
@overload(
    "--max-logprobs-memory",
    type=BytesType(),
    default="1g",
    help="Maximum memory for the log-probabilities of all running requests: 1g is 1 GiB. A request that would "
    "exceed it gets status 429, and 400 if it could never fit.",
)
@overload(
    "--responses-store",
    type=CountType(0),
    default=1000,
    help="Maximum number of responses kept for GET /v1/responses/ID and previous_response_id; the least recently used "
    "ones are dropped first. 0 keeps none.",
)
@overload(
    "--responses-memory",
    type=BytesType(),
    default="256m",
    help="Maximum memory for the kept responses and the conversations before them.",
)
@overload(
    "--step-timeout",
    type=float,
    default=60.0,
    help="Seconds after which a step of the engine that has not ended makes /health fail, and new requests get status "
    "503; 0 turns this off.",
)
@section("Operation")(
    "--strict-keys",
    is_flag=True,
    help="Refuse requests with keys or types of tools that this server does not know. Otherwise they are ignored, and "
    "named in the header X-Enginewright-Warning and in the log.",
)
@section("Operation")(
    "--metrics-compat",
    type=click.Choice(("vllm",)),
    show_default="only our names",
    help="Add the names of another server to /metrics, so that its dashboards, routers and autoscalers work.",
)
@section("KV events")(
    "--kv-events",
    metavar="ADDRESS",
    show_default="none are sent",
    help="ZeroMQ address that tells routers which blocks the prefix cache has, in vLLM's messages: tcp://*:5557 "
    "listens, tcp://router:5557 connects. Anyone who can connect reads the tokens of all prompts.",
)
@section("KV events")(
    "--kv-events-replay",
    metavar="ADDRESS",
    show_default="none",
    help="ZeroMQ address to listen on, where routers request messages that they have missed.",
)
@section("KV events")("--kv-events-topic", metavar="TEXT", default="", show_default="empty", help="Topic of messages.")
@section("Prefill and decode apart")(
    "--kv-role",
    type=click.Choice(KV_ROLES),
    show_default="both parts of each answer, and no KV blocks move",
    help="Part of an answer that this server computes: prefill leases the KV blocks of prompts to servers that decode, "
    "which fetch them. A router sends each request to one of either kind (docs/disaggregation.md).",
)
@section("Prefill and decode apart")(
    "--kv-listen",
    metavar="HOST:PORT",
    show_default="a free port of 127.0.0.1",
    help="Address where servers that decode fetch KV blocks. Blocks are authenticated, but not encrypted.",
)
@section("Shared KV cache")(
    "--kv-cache-remote",
    metavar="URL",
    show_default="nothing is shared",
    help="Place where servers share the KV blocks of prompts, encrypted: s3://BUCKET/PREFIX?endpoint=https://HOST:PORT "
    "or tcp://HOST:PORT, the --kv-cache-listen of another server. Needs --kv-secret-file (docs/kv-store.md).",
)
@section("Shared KV cache")(
    "--kv-cache-share",
    type=BytesType(),
    show_default="nothing is shared",
    help="Memory of this server in which it keeps KV blocks for itself and for others, which read and write them at "
    "--kv-cache-listen.",
)
@section("Shared KV cache")(
    "--kv-cache-listen",
    metavar="HOST:PORT",
    show_default="none",
    help="Address of the blocks of --kv-cache-share for other servers.",
)
@section("Shared KV cache")(
    "--kv-secret-file",
    type=click.Path(dir_okay=False),
    show_default="none",
    help="File of the secret that the servers know which share or move KV blocks; openssl rand -hex 32 makes one.",
)
@section("Operation")(
    "--otlp-traces-endpoint",
    metavar="URL",
    show_default="no traces",
    help="Send a span for each request to this OpenTelemetry collector, by OTLP over HTTP: "
    "http://127.0.0.1:4318/v1/traces.",
)
@section("Keys")(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="ENGINEWRIGHT_API_KEY",
    show_default="ENGINEWRIGHT_API_KEY, or no key is needed",
    help="A key that clients must send. The option may be given several times; each key is accepted. The "
    "variable ENGINEWRIGHT_API_KEY (several keys separated by spaces) is safer: other users of the machine can see "
    "the options of a command.",
)
@section("Keys")(
    "--tenant-class",
    "tenant_classes",
    multiple=True,
    metavar="NAME",
    show_default="tenants have no classes",
    help="A class of the tenant of a key, such as paid, by which metrics are sliced. The option is given once for each "
    "key, in the order of the keys.",
)
@section("Keys")(
    "--admin-key",
    "admin_keys",
    multiple=True,
    envvar="ENGINEWRIGHT_ADMIN_KEY",
    show_default="ENGINEWRIGHT_ADMIN_KEY, or nobody may",
    help="A key that allows to add and remove adapters (--enable-lora-updates). The option may be given several times.",
)
@LOG_OPTIONS
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

    ENGINE is a file that `engine build` wrote, or a folder of such files. If there are several, each is opened when a
    request names it, and closed when its memory is needed. It may also be a MODEL, as for `engine build`: its engine is
    then built once, and kept in the cache. The server runs until SIGTERM or Ctrl-C.
    """
    from enginewright.builder.model_cache import adapter_files, engine_files
    from enginewright.runtime.server.config import ServerConfig
    from enginewright.runtime.server.log import STDERR, log_to
    from enginewright.runtime.server.serve import serve

    limits = pop_options(options, (*LIMITS, *RUN_LIMITS))
    config = ServerConfig(**options)
    limits["enable_lora"] = config.has_adapters
    files = engine_files(engines, quant=quant, device=limits["device"], memory=config.memory, rebuild=rebuild)
    config = replace(config, lora_modules=adapter_files(config.lora_modules, files))
    with log_to(STDERR, log_level, log_format) as announce:
        serve(files, config, announce=announce, verify=verify, **limits)
