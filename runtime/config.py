"""Limits that the runtime chooses when it opens an engine."""

from dataclasses import dataclass, replace
from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.manifest import NGRAM, ROLES
from enginewright.rank_layout import RankLayout
from enginewright.runtime.count import format_bytes

TEXTS = (
    *("isa", "device", "speculate", "kv_events", "kv_events_replay", "kv_events_topic", "kv_cache_dir"),
    *("kv_cache_remote", "kv_cache_listen", "kv_role", "kv_listen", "kv_secret_file"),
    *("master_addr", "secret_file", "distributed_executor_backend"),
)
BYTES = ("kv_cache_memory", "kv_cache_disk", "kv_cache_share", "grammar_memory")
FLAGS = ("enable_prefix_caching", "enable_lora", "mmap")  # limits that are True or False
KV_ROLES = ("prefill", "decode", "both")
S3, TCP = "s3://", "tcp://"  # what kv_cache_remote begins with
SPECULATE = ("off", NGRAM, *ROLES)
MIN_GRAMMAR_MEMORY = 64 << 20  # bytes; one grammar usually takes 4 MiB, and may take a sixteenth of the memory
MAX_RANKS = 64  # maximum number of ranks
MP, RAY = "mp", "ray"  # other machines of an engine: those that run `engine worker`, or nodes of a Ray cluster
MASTER_PORT = 29501  # default port where the machines of ranks find each other, as vLLM has it
MAX_DRAFT_TOKENS = 32  # maximum number of draft tokens of a sequence in a step


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits of an open engine; None means a default that depends on the engine or the machine.

    Raises:
        UsageError: a limit has the wrong type, is not positive, is unknown or too large.
    """

    max_model_len: int | None = None  # maximum number of tokens of a sequence, prompt and answer together
    max_num_seqs: int = 32  # maximum number of sequences in a step
    max_num_batched_tokens: int = 512  # maximum number of tokens in a step, at least max_num_seqs
    max_logit_rows: int | None = None  # maximum number of rows of logits in a step, at least max_num_seqs
    kv_cache_memory: int | None = None  # bytes of the KV cache
    enable_prefix_caching: bool = True  # prompts with a common prefix share its cache blocks
    # Prompt tokens in a step that also decodes, so that running answers keep their pace. Tokens deep in a prompt count
    # for more (prompt_cost.py). None allows all that max_num_batched_tokens leaves.
    prefill_chunk_size: int | None = None
    # Goal for the milliseconds of a step that also decodes. Once steps have been measured, it replaces
    # prefill_chunk_size: prompts get the time that the goal leaves.
    itl_slo_ms: int | None = None
    threads: int | None = None  # threads of the CPU executor; None is one for each core
    isa: str | None = None  # instruction set of the CPU executor; None is the best one that the machine has
    device: str = "auto"  # device to run on, as `open_engine` takes it
    # True uses the weights where their file is mapped. False reads them into memory, so that later changes of the file
    # do not matter. The weights of a GPU are always read.
    mmap: bool = True
    speculate: str | None = None  # source of draft tokens, one of SPECULATE; None is the one that the manifest names
    speculate_tokens: int = 8  # maximum number of draft tokens of a sequence in a step
    kv_events: str | None = None  # ZeroMQ address where changes of the prefix cache are published (kv_events.py)
    kv_events_replay: str | None = None  # ZeroMQ address where subscribers ask for events that they missed
    kv_events_topic: str = ""  # prefix of each message
    kv_cache_disk: int | None = None  # bytes of files that keep blocks of the prefix cache
    kv_cache_dir: str | None = None  # folder of these files; None is one in the user's cache folder
    # Place where servers share blocks of the prefix cache: a bucket (s3://…), or the memory of a peer (tcp://HOST:PORT).
    kv_cache_remote: str | None = None
    kv_cache_share: int | None = None  # bytes of this server's memory in which it keeps blocks for itself and others
    kv_cache_listen: str | None = None  # HOST:PORT where others read and write these blocks
    # Part of the work where prefill and decode are apart, one of KV_ROLES; None is both parts of each answer.
    kv_role: str | None = None
    kv_listen: str | None = None  # HOST:PORT where other servers fetch prompts; None is a free port of 127.0.0.1
    kv_secret_file: str | None = None  # file of the secret that all of these servers know
    enable_lora: bool = False  # requests may name adapters
    max_loras: int | None = None  # maximum number of adapters in a step; None is max_num_seqs, or on a GPU at most 8
    max_lora_rank: int = 64  # maximum rank of an adapter's module
    max_cpu_loras: int = 256  # maximum number of adapters that stay open
    tensor_parallel_size: int = 1  # number of processes that compute the model together, each a part of each layer
    pipeline_parallel_size: int = 1  # number of stages of layers, each with tensor_parallel_size processes of its own
    nnodes: int = 1  # number of machines on which they run, each the same number of them; this one is node 0
    master_addr: str | None = None  # address of this machine where the others (`engine worker`) reach it
    master_port: int = MASTER_PORT  # TCP port of this address
    secret_file: str | None = None  # file of the secret that these machines know
    distributed_executor_backend: str | None = None  # RAY: they are nodes of a Ray cluster; None or MP: `engine worker`
    grammar_memory: int = 256 << 20  # bytes of compiled grammars for structured outputs, at least MIN_GRAMMAR_MEMORY

    def __post_init__(self) -> None:
        for name, field in RuntimeConfig.__dataclass_fields__.items():
            value = getattr(self, name)
            if value is not None or field.default is not None:
                _check_limit(name, value)
        if self.speculate not in (None, *SPECULATE):
            raise UsageError(f"speculate is {shorten(self.speculate)}", f"it must be one of {', '.join(SPECULATE)}")
        self._check_ranks()
        self._check_nodes()
        if self.speculate_tokens > MAX_DRAFT_TOKENS:
            raise UsageError(f"speculate_tokens is {self.speculate_tokens}", f"it must be {MAX_DRAFT_TOKENS} or less")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise UsageError("kv_events_replay and kv_events_topic need kv_events", "no events are sent without it")
        if self.grammar_memory < MIN_GRAMMAR_MEMORY:
            why = f"it must be {format_bytes(MIN_GRAMMAR_MEMORY)} or more"
            raise UsageError(f"grammar_memory is {format_bytes(self.grammar_memory)}", why)
        if self.kv_cache_disk is None and self.kv_cache_dir is not None:
            raise UsageError("kv_cache_dir needs kv_cache_disk", "nothing is kept on disk without it")
        self._check_kv_role()
        self._check_shared_kv_cache()
        uses = [name for name in ("kv_role", "kv_cache_remote", "kv_cache_share") if getattr(self, name) is not None]
        if uses and self.kv_secret_file is None:
            raise UsageError(
                f"{uses[0]} needs kv_secret_file",
                "KV blocks move only between servers that know one secret",
                "Make one: openssl rand -hex 32 > FILE, and copy it to each server.",
            )
        if not uses and self.kv_secret_file is not None:
            raise UsageError("kv_secret_file needs kv_role or kv_cache_remote", "no KV blocks move without it")

    def _check_ranks(self) -> None:
        sizes = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        if self.num_ranks > MAX_RANKS:
            what = " × ".join(name for name, size in sizes.items() if size > 1)
            raise UsageError(f"{what} is {self.num_ranks}", f"it must be {MAX_RANKS} or less")

    def _check_nodes(self) -> None:
        if self.master_port > 65535:
            raise UsageError(f"master_port is {self.master_port}", "it must be 65535 or less")
        backend = self.distributed_executor_backend
        if backend not in (None, MP, RAY):
            raise UsageError(f"distributed_executor_backend is {shorten(backend)}", f"it must be {MP} or {RAY}")
        if self.nnodes == 1:
            given = {"master_addr": self.master_addr, "secret_file": self.secret_file}
            uses = [name for name, value in given.items() if value is not None]
            if backend == RAY:
                uses.append(f"distributed_executor_backend {RAY}")
            if uses:
                raise UsageError(f"{uses[0]} needs nnodes", "no other machine is waited for without it")
            return
        if self.num_ranks % self.nnodes:
            sizes = f"tensor_parallel_size {self.tensor_parallel_size}"
            if self.pipeline_parallel_size > 1:
                sizes += f" × pipeline_parallel_size {self.pipeline_parallel_size}"
            raise UsageError(
                f"{sizes} cannot be divided among {self.nnodes} machines",
                "each machine runs the same number of processes",
                f"Use a multiple of {self.nnodes}.",
            )
        self._check_address_and_secret()

    def _check_address_and_secret(self) -> None:
        fix = "Give the address of this machine by which the others reach it."
        if self.master_addr in ("0.0.0.0", "::", ""):
            raise UsageError(f"master_addr is {shorten(self.master_addr)}", "it must be one address", fix)
        if self.distributed_executor_backend == RAY:
            if self.secret_file is not None:
                raise UsageError("secret_file is for engine worker", "the nodes of Ray get a secret of their own")
            return
        if self.master_addr is None:
            raise UsageError("nnodes needs master_addr", "this machine has to be found by the others", fix)
        if self.secret_file is None:
            raise UsageError(
                "nnodes needs secret_file",
                "only machines that know one secret compute together",
                "Make one: openssl rand -hex 32 > FILE, and copy it to each machine.",
            )

    def _check_kv_role(self) -> None:
        if self.kv_role is None:
            if self.kv_listen is not None:
                raise UsageError("kv_listen needs kv_role", "no leases are given without it")
            return
        if self.kv_role not in KV_ROLES:
            raise UsageError(f"kv_role is {shorten(self.kv_role)}", f"it must be one of {', '.join(KV_ROLES)}")
        if self.kv_listen is None:
            return
        if self.kv_role == "decode":
            raise UsageError("kv_listen is for servers that prefill", "this one only fetches")
        _check_address("kv_listen", self.kv_listen)
        if split_address(self.kv_listen)[0] in ("0.0.0.0", "::"):
            fix = "Give the address by which the servers that decode reach this one."
            raise UsageError(f"kv_listen is {self.kv_listen}", "other servers cannot reach this address", fix)

    def _check_shared_kv_cache(self) -> None:
        if (self.kv_cache_share is None) != (self.kv_cache_listen is None):
            raise UsageError("kv_cache_share and kv_cache_listen go together", "one says how much, the other where")
        if self.kv_cache_listen is not None:
            _check_address("kv_cache_listen", self.kv_cache_listen)
        if self.kv_cache_remote is None:
            return
        if self.kv_cache_share is not None:
            why = "blocks are shared in one place: a bucket, a peer's memory, or this server's own"
            raise UsageError("kv_cache_remote and kv_cache_share exclude each other", why)
        if self.kv_cache_remote.startswith(TCP):
            _check_address("kv_cache_remote", self.kv_cache_remote.removeprefix(TCP), TCP)
        elif not self.kv_cache_remote.startswith(S3):
            why = f"it must be {S3}BUCKET/PREFIX or {TCP}HOST:PORT"
            raise UsageError(f"kv_cache_remote is {shorten(self.kv_cache_remote)}", why)

    @property
    def rank_layout(self) -> RankLayout:
        """Arrangement of the processes that compute the model."""
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def num_ranks(self) -> int:
        """Number of the processes that compute the model."""
        return self.rank_layout.size

    @property
    def on_one_rank(self) -> "RuntimeConfig":
        """These limits for a model that this process computes alone."""
        return replace(
            self,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            nnodes=1,
            master_addr=None,
            secret_file=None,
            distributed_executor_backend=None,
        )

    @property
    def shares_kv_cache(self) -> bool:
        """True if the prefix cache is shared with other servers."""
        return self.kv_cache_remote is not None or self.kv_cache_share is not None

    @property
    def has_stores(self) -> bool:
        """True if the prefix cache is kept outside the engine's memory, too."""
        return self.kv_cache_disk is not None or self.shares_kv_cache

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a sequence in a step; 0 without speculation."""
        return 0 if self.speculate in (None, "off") else self.speculate_tokens


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, which RuntimeConfig has checked."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _check_address(name: str, address: str, scheme: str = "") -> None:
    """Raises UsageError if an address is not HOST:PORT, after the scheme if there is one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{name} is {shorten(scheme + address)}", f"it must be {scheme}HOST:PORT")


def _check_limit(name: str, value: Any) -> None:
    if name in TEXTS:
        holds, rule = isinstance(value, str), "it must be a text"
    elif name in FLAGS:
        holds, rule = isinstance(value, bool), "it must be True or False"
    else:
        holds = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63
        rule = "it must be a whole number of at least 1"
    if not holds:
        raise UsageError(f"{name} is {shorten(value)}", rule)
