"""Options that several commands have."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from enginewright.cli.help import Decorator, section, with_options
from enginewright.cli.values import BytesType, CountType, JsonObjectType
from enginewright.quant_methods import QUANT_METHODS
from enginewright.runtime.config import MASTER_PORT, MAX_DRAFT_TOKENS, MP, RAY, SPECULATE

QUANTS = tuple(QUANT_METHODS)


def pop_options(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Takes the options of these names out of a command's options, and returns them."""
    return {name: options.pop(name) for name in names}


_limits = section("Limits")
_kv_cache = section("KV cache")
_machine = section("Machine")
_speculation = section("Speculation")
nodes_section = section("Several machines")

THREADS_OPTION = _machine(
    "--threads",
    type=CountType(),
    show_default="ENGINEWRIGHT_NUM_THREADS, or the number of physical cores",
    help="Number of CPU threads for computation.",
)
ISA_OPTION = _machine(
    "--isa",
    show_default="ENGINEWRIGHT_CPU_ISA, or the best one of this CPU",
    help="CPU instruction set: amx, avx512, avx512-vnni, avx2-vnni, avx2 or portable.",
)
MMAP_OPTION = _machine(
    "--mmap/--no-mmap",
    default=True,
    help="Memory-map the weights: the start is fast, and processes share them. --no-mmap copies them into memory, "
    "which is safe if the file may change while the engine runs.",
)
DEVICE_OPTION = _machine(
    "--device",
    default="auto",
    help="Device that runs the engine: cpu, cuda, cuda:1 for the second GPU, or auto, which is the first GPU if the "
    "engine has code for it, and otherwise the CPU.",
)

MASTER_PORT_OPTION = nodes_section(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=MASTER_PORT,
    help="TCP port at --master-addr. It has nothing to do with the port of the HTTP server.",
)
SECRET_FILE_OPTION = nodes_section(
    "--secret-file",
    type=click.Path(dir_okay=False),
    show_default="none; several machines need it",
    help="File of the secret by which the machines know each other; openssl rand -hex 32 makes one.",
)

VERIFY_OPTION = _machine(
    "--verify",
    is_flag=True,
    help="Check the hashes of the weights before the start, which takes about a second for 2 GiB. The hashes of all "
    "other parts of the file are always checked.",
)
EVERY_LINE_OPTION = section("Output")(
    "--all", "every_line", is_flag=True, help="List every difference; long lists are cut short otherwise."
)

# Names of the values of LIMIT_OPTIONS, the options of every command that runs an engine.
LIMITS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "enable_prefix_caching",
    "speculate",
    "speculate_tokens",
    "device",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "master_addr",
    "master_port",
    "secret_file",
    "distributed_executor_backend",
    "threads",
    "isa",
    "mmap",
)
LIMIT_OPTIONS = with_options(
    _limits(
        "--max-model-len",
        type=CountType(),
        show_default="the limit that the engine was built with",
        help="Longest sequence in tokens: prompt and answer together. 32k is 32768.",
    ),
    _limits(
        "--max-num-seqs",
        type=CountType(),
        default=32,
        help="Maximum number of sequences in one step (the batch size).",
    ),
    _limits(
        "--max-num-batched-tokens",
        type=CountType(),
        default=512,
        help="Maximum number of tokens in one step, over all sequences. Longer prompts take several steps.",
    ),
    _kv_cache(
        "--kv-cache-memory",
        type=BytesType(),
        show_default="half of the memory that weights and activations leave free",
        help="Memory for the KV cache, of the GPU if the engine runs on one: 2GiB, 2g (the same), 2GB or 512m.",
    ),
    _kv_cache(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        help="Keep the KV cache of prompts, so that a prompt with the same prefix need not compute it again.",
    ),
    _speculation(
        "--speculate",
        type=click.Choice(SPECULATE),
        show_default="the engine's default (engine build --draft auto), or off",
        help="Speculative decoding: propose draft tokens, and verify several of them in one step. Answers are bit for "
        "bit the same, and faster if many draft tokens are accepted. ngram copies the tokens that followed earlier "
        "occurrences of the last tokens, in the prompt, the answer or earlier answers. draft uses a smaller model, "
        "skip the first layers of the model itself, mtp the checkpoint's own layer for it, and eagle and medusa "
        "trained heads; `engine build --draft` puts these into the engine.",
    ),
    _speculation(
        "--speculate-tokens",
        type=CountType(),
        default=8,
        help=f"Maximum number of draft tokens for a sequence in one step, up to {MAX_DRAFT_TOKENS}. Fewer are proposed "
        "where more would not make answers faster.",
    ),
    DEVICE_OPTION,
    _machine(
        "--tensor-parallel-size",
        "-tp",
        type=CountType(),
        default=1,
        help="Number of processes that compute the model together on CPUs, each a part of every layer: one for each "
        "socket of a machine. --threads is then for each process. Answers are bit for bit the same for any number.",
    ),
    _machine(
        "--pipeline-parallel-size",
        "-pp",
        type=CountType(),
        default=1,
        help="Number of stages of layers, each of --tensor-parallel-size processes. Sequences pass through them in "
        "groups. It is for machines with a slow network, since little moves between stages.",
    ),
    nodes_section(
        "--nnodes",
        type=CountType(),
        default=1,
        help="Number of machines among which the processes of --tensor-parallel-size and --pipeline-parallel-size are "
        "divided evenly. This one is node 0; each other one runs `engine worker` with the same engine file.",
    ),
    nodes_section(
        "--master-addr",
        metavar="HOST",
        show_default="none; --nnodes needs it",
        help="Address of this machine to listen on, by which the others reach it.",
    ),
    MASTER_PORT_OPTION,
    SECRET_FILE_OPTION,
    nodes_section(
        "--distributed-executor-backend",
        type=click.Choice((MP, RAY)),
        default=MP,
        help="Kind of the other machines. mp: they run `engine worker`. ray: nodes of the Ray cluster of this machine, "
        "which need neither --master-addr nor --secret-file, and have the engine file at the same path.",
    ),
    THREADS_OPTION,
    ISA_OPTION,
    MMAP_OPTION,
)

_address, _overload, _log = section("Address"), section("Overload"), section("Log")
LOG_OPTIONS = with_options(
    _log(
        "--log-level",
        type=click.Choice(("error", "warning", "info", "debug")),
        default="info",
        help="Lowest level that is logged on stderr; info has a line for each request.",
    ),
    _log("--log-format", type=click.Choice(("text", "json")), default="text", help="Form of each line of the log."),
)


def hosting_options(port: int) -> Decorator:
    """Options of a command that serves HTTP: the fields of HostingConfig that are no constants.

    Args:
        port: the default port.
    """
    return with_options(
        _address(
            "--host",
            default="127.0.0.1",
            help="Address to listen on. 0.0.0.0 accepts connections from other machines.",
        ),
        _address(
            "--port",
            type=click.IntRange(0, 65535),
            default=port,
            help="Port to listen on; 0 takes any free one.",
        ),
        _address(
            "--allowed-host",
            "allowed_hosts",
            multiple=True,
            show_default="on a loopback address its own names, otherwise any",
            help="A name that requests may have in their Host header. The option may be given several times.",
        ),
        _address(
            "--ssl-certfile",
            type=click.Path(path_type=Path, dir_okay=False),
            show_default="no TLS",
            help="Serve HTTPS with this PEM file of the certificate and its chain, which is read again after SIGHUP.",
        ),
        _address(
            "--ssl-keyfile",
            type=click.Path(path_type=Path, dir_okay=False),
            show_default="in --ssl-certfile",
            help="The certificate's private key, a PEM file without a password.",
        ),
        _overload(
            "--max-connections",
            type=CountType(),
            show_default="what the limit of open files allows, up to 4096",
            help="Maximum number of open connections of clients. More are refused with status 503.",
        ),
        _overload(
            "--drain-seconds",
            type=float,
            default=30.0,
            help="Seconds that running and waiting requests may take to finish after SIGTERM or Ctrl-C.",
        ),
    )


_workload = section("Requests")
# Names of the values of WORKLOAD_OPTIONS, the options of `engine bench offline` and `serve`.
WORKLOAD = ("num_prompts", "input_len", "output_len", "shared_prefix_len", "dataset", "seed", "ignore_eos")
WORKLOAD_OPTIONS = with_options(
    _workload(
        "--num-prompts", type=CountType(), show_default="32, or every line of --dataset", help="Number of requests."
    ),
    _workload(
        "--input-len",
        default="128",
        help="Length of each prompt in tokens. 64:256 is a random length from 64 to 256 for each.",
    ),
    _workload(
        "--output-len",
        default="64",
        help="Length of each answer in tokens. 64:256 is a random length from 64 to 256 for each.",
    ),
    _workload(
        "--shared-prefix-len",
        type=int,
        default=0,
        help="Length in tokens of a prefix that all prompts share.",
    ),
    _workload(
        "--dataset",
        type=click.Path(path_type=Path, dir_okay=False),
        show_default="random prompts",
        help='Take the prompts from a file of JSON lines, each {"prompt": …} or {"messages": […]}, with "max_tokens" '
        "if the length of the answer differs from --output-len.",
    ),
    _workload(
        "--seed",
        type=int,
        default=0,
        help="Seed of random prompts and lengths, and of the arrival times of requests to a server.",
    ),
    _workload(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        help="Continue each answer to its full length, even if the model would end it earlier.",
    ),
)

_format = section("Format")
GROUP_SIZES = (32, 64, 128, 256, 512, 0)
# Settings of single quantization methods; other methods refuse them.
QUANT_OPTIONS = with_options(
    _format(
        "--group-size",
        type=click.Choice(GROUP_SIZES),
        show_default="the method's own",
        help="Number of columns of a weight that share one scale; 0 is one scale for each row.",
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
        help="Only for --quant int8-sq: compute the scales of activations for each token (dynamic), or use fixed "
        "scales from calibration (static).",
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
    type=JsonObjectType(),
    show_default="none",
    help='Variables of the chat template, as JSON: {"enable_thinking": false} turns Qwen3\'s thinking off.',
)

_sampling = section("Sampling")
MODELS_OWN = "the model's own (generation_config.json)"
# Fields of SamplingParams.
SAMPLING_OPTIONS = with_options(
    _sampling(
        "--temperature",
        type=float,
        show_default=f"{MODELS_OWN}, or 0",
        help="Randomness of the answer: 0 always takes the most likely token, 1 samples from the model's "
        "probabilities.",
    ),
    _sampling(
        "--top-k",
        type=int,
        show_default=f"{MODELS_OWN}, or all",
        help="Sample only from this many of the most likely tokens.",
    ),
    _sampling(
        "--top-p",
        type=float,
        show_default=f"{MODELS_OWN}, or 1",
        help="Sample only from the smallest set of most likely tokens whose probabilities add up to this.",
    ),
    _sampling(
        "--min-p",
        type=float,
        show_default=f"{MODELS_OWN}, or 0",
        help="Sample only tokens that are at least this likely, relative to the most likely one.",
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
        show_default="random",
        help="Seed of sampling: the same seed gives the same answer.",
    ),
)
