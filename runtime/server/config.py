"""The settings of a server."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from enginewright.errors import UsageError
from enginewright.runtime.server.cors import ORIGIN
from enginewright.runtime.server.hosting_config import AT_LEAST_0, AT_LEAST_1, SECONDS, HostingConfig, Rule, check_rules
from enginewright.runtime.text.messages.formats import call_format

METRICS_COMPAT = ("vllm",)
MAX_TENANT_CLASSES = 8  # different ones, since each is a value of a label of metrics


@dataclass(frozen=True)
class ServerConfig(HostingConfig):
    """Settings of the server; those of the engines are in RuntimeConfig.

    Raises:
        UsageError: a value is not valid.
    """

    served_model_names: tuple[str, ...] = ()  # names of the model in requests; empty means the engine's own name
    api_keys: tuple[str, ...] = ()  # accepted API keys; with any, every route except /health and the page requires one
    # class of each key's tenant in metrics, in the order of the keys; empty means that tenants have no classes
    tenant_classes: tuple[str, ...] = ()
    page: bool = True  # True serves the web page at /
    max_num_waiting: int = 1024  # maximum number of completions that wait for their first token outside the batch
    max_waiting_tokens: int = 262_144  # maximum number of tokens of all waiting prompts
    strict_keys: bool = False  # True refuses keys of a request that are not used, False names them in a warning
    max_logprobs_memory: int = 1 << 30  # maximum bytes for log-probabilities of all running requests
    responses_store: int = 1000  # number of responses kept for GET /v1/responses/{id} and previous_response_id
    responses_memory: int = 256 << 20  # maximum bytes of these responses
    step_timeout: float = 60.0  # seconds after which a step of the engine counts as stalled; 0 means never
    tool_call_parser: str | None = None  # name of a CallFormat; None detects it from the chat template
    memory: int | None = None  # bytes that open engines may take together; None is the machine's free memory
    idle_seconds: float | None = None  # seconds without requests after which an engine is closed; None means never
    # origins of web pages of other sites that may use the server, as browsers send them
    allowed_origins: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()  # adapters that requests may name, each as NAME=FILE
    lora_dir: str | None = None  # folder whose files NAME.lora are adapters as well; None means that there is none
    enable_lora_updates: bool = False  # True lets holders of an admin key add and remove adapters of lora_dir
    admin_keys: tuple[str, ...] = ()  # keys of those who may change what is served
    metrics_compat: str | None = None  # one of METRICS_COMPAT, whose metric names /metrics has in addition to ours
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector; None means no traces

    @property
    def on_demand(self) -> bool:
        """True if even a single engine is opened at its first request instead of at the start."""
        return self.memory is not None or self.idle_seconds is not None

    @property
    def has_adapters(self) -> bool:
        """True if requests may name adapters."""
        return bool(self.lora_modules) or self.lora_dir is not None

    @property
    def adapter_files(self) -> dict[str, Path]:
        """Name → file of each adapter of lora_modules."""
        return {name: Path(file) for name, _, file in (one.partition("=") for one in self.lora_modules)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self, _RULES, _RULES_OF_EACH)
        keys = (*self.api_keys, *self.admin_keys)
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
            raise UsageError("an API key is empty or cannot be sent", "it must be printable ASCII without outer spaces")
        if self.tenant_classes and len(self.tenant_classes) != len(self.api_keys):
            raise UsageError(
                f"there are {len(self.tenant_classes)} tenant_classes and {len(self.api_keys)} API keys",
                "each key must have a class",
                "Name one class for each key, in the order of the keys; keys may have the same class.",
            )
        if self.enable_lora_updates and (self.lora_dir is None or not self.admin_keys):
            why = "they add files of lora_dir, and only holders of an admin key may"
            raise UsageError("enable_lora_updates needs lora_dir and admin_keys", why)
        if (count := len(set(self.tenant_classes))) > MAX_TENANT_CLASSES:
            raise UsageError(f"there are {count} different tenant_classes", f"there may be {MAX_TENANT_CLASSES}")


def tenant_of(key: bytes | str) -> str:
    """The tenant of an API key, which is its hash, so that the key itself is kept nowhere else."""
    return sha256(key.encode() if isinstance(key, str) else key).hexdigest()


# Rules of fields that are not None.
_RULES: Mapping[str, Rule] = {
    "max_num_waiting": AT_LEAST_1,
    "max_waiting_tokens": AT_LEAST_1,
    "max_logprobs_memory": AT_LEAST_1,
    "responses_store": AT_LEAST_0,
    "responses_memory": AT_LEAST_1,
    "step_timeout": SECONDS,
    "tool_call_parser": Rule(call_format),
    "memory": AT_LEAST_1,
    "idle_seconds": SECONDS,
    "lora_dir": Rule(os.path.isdir, "there is no such folder"),
    "metrics_compat": Rule(METRICS_COMPAT.__contains__, f"it must be {', '.join(METRICS_COMPAT)}"),
    "otlp_traces_endpoint": Rule(
        re.compile("https?://[^/]+/").match, "it must be a URL with its path, such as http://127.0.0.1:4318/v1/traces"
    ),
}
# Rules of each value of a tuple.
_RULES_OF_EACH: Mapping[str, Rule] = {
    "served_model_names": Rule(lambda name: name and name.isprintable(), "it must be printable characters"),
    "tenant_classes": Rule(
        re.compile("[a-z][a-z0-9_-]{0,31}").fullmatch,
        "it must be 1 to 32 lower-case letters, digits, _ and -, and begin with a letter",
    ),
    "lora_modules": Rule(
        lambda module: module.isprintable() and all(module.partition("=")), "it must be NAME=FILE, printable characters"
    ),
    "allowed_origins": Rule(
        ORIGIN.fullmatch,
        "it must be as browsers send it: scheme, host in lower case, and any port that is not the default",
        "Name each site, such as https://chat.example.com: * would let any web page use the server.",
    ),
}
