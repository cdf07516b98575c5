"""adapter_config.json: the choices of an adapter that change what it computes.

Source: PEFT, peft/tuners/lora/config.py (`LoraConfig`) and peft/utils/other.py (`get_pattern_key`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from enginewright.builder.adapters.experts import DOWN, GATE_UP
from enginewright.builder.config import ConfigReader

T = TypeVar("T")

ADAPTER_CONFIG = "adapter_config.json"
MAX_PATTERNS = 256  # keys of rank_pattern or alpha_pattern
MAX_PATTERN_CHARS = 256  # characters of such a key
MAX_PATTERN_REPEATS = 1  # `*`, `+` and `{` of such a key: the time to match grows with the power of their number

# Keys that need not be read, with the reason.
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        "The names of the tensors say which modules have an adapter.",
    ),
    **dict.fromkeys(
        ("lora_dropout", "inference_mode", "task_type", "auto_mapping", "ensure_weight_tying", "velora_config"),
        "It is about training, or about classes of PEFT.",
    ),
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "It belongs to a choice of init_lora_weights or use_qalora, which is read.",
    ),
    **dict.fromkeys(
        ("megatron_config", "megatron_core", "runtime_config"), "It says how another library is to run the adapter."
    ),
    **dict.fromkeys(
        ("base_model_name_or_path", "revision", "peft_version"),
        "It says where the adapter comes from; names and shapes of the tensors are compared with the model's.",
    ),
}
# Keys of features that are not implemented, and refused unless they are off.
REFUSED = (
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
# Prefixes of init_lora_weights whose methods change the weights of the base model, too.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Reason of PEFT, peft/tuners/lora/layer.py (`ParamWrapper`).
NOT_OF_EXPERTS = "PEFT has neither lengths (DoRA) nor biases of experts, and refuses such an adapter, too"
INITS = ("gaussian", "eva", "orthogonal")  # other values that are text


@dataclass(frozen=True)
class PeftConfig:
    """The choices of a LoRA adapter, complete and checked."""

    rank: int  # rank of modules that no pattern names
    alpha: float  # alpha of modules that no pattern names
    rank_pattern: Mapping[re.Pattern[str], int]  # regular expression of a module's name → rank
    alpha_pattern: Mapping[re.Pattern[str], float]  # regular expression of a module's name → alpha
    use_rslora: bool  # True: products are scaled by alpha / √rank instead of alpha / rank
    use_dora: bool  # True: rows of merged weights are scaled to learned lengths
    fan_in_fan_out: bool  # True: weights are stored [in, out]
    adapts_experts: bool  # True: `target_parameters` name the matrices of experts
    # tokens that invoke it: it is for them and what follows them (aLoRA); empty: it is for all tokens
    invocation_tokens: tuple[int, ...]
    token_indices: Mapping[str, tuple[int, ...]]  # name of an embedding, or "" → ids of tokens with rows of their own
    # name of a module in the base → in transformers' model, which the keys of this config are about; others are alike
    names: Mapping[str, str] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Rank of a module by the config; module: its name in the base, such as model.layers.0.self_attn.q_proj."""
        return _first_match(self.rank_pattern, self._own_name(module), self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of a module's product B · A; module: its name in the base."""
        rank, alpha = self.rank_of(module), _first_match(self.alpha_pattern, self._own_name(module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Ids of the tokens that have rows of their own in an embedding; module: its name in the base."""
        own = f".{self._own_name(module)}"
        named = (ids for name, ids in self.token_indices.items() if own.endswith(f".{name}"))
        return next(named, self.token_indices.get("", ()))

    def _own_name(self, module: str) -> str:
        """Name of a module, or of a parameter of one, in transformers' model."""
        parent, _, parameter = module.rpartition(".")
        own = self.names.get(parent)
        return self.names.get(module, module if own is None else f"{own}.{parameter}")


def read_peft_config(values: Mapping[str, Any]) -> PeftConfig:
    """Reads the content of adapter_config.json. Every key is read, excused (HARMLESS) or refused by name.

    Args:
        values: key → value.

    Raises:
        UnsupportedModelError: the adapter is of another kind, or has a feature that is not implemented.
        EngineError: a value is missing or wrong.
    """
    config = ConfigReader(values, ADAPTER_CONFIG)
    if (kind := config.read(str, "peft_type")) != "LORA":
        raise config.unsupported(f"peft_type = {kind!r}", "Adapters of type LORA can be used.")
    for key in REFUSED:
        if not (config.holds(key, None) or config.holds(key, False) or config.holds(key, [])):
            raise config.unsupported(f"{key} is used", "Merge the adapter with PEFT, and build the merged model.")
    _check_init(config)
    bias = config.read(str, "bias", default="none")
    if bias not in ("none", "all", "lora_only"):
        raise config.error(f"bias is {bias!r}, not none, all or lora_only")
    has_bias = config.read(bool, "lora_bias", default=False)  # biases that the file has are used
    peft = PeftConfig(
        rank=config.read_size("r", default=8),
        alpha=config.read(float, "lora_alpha", default=8.0),
        rank_pattern={key: _whole(config, rank) for key, rank in _patterns(config, "rank_pattern").items()},
        alpha_pattern=_patterns(config, "alpha_pattern"),
        use_rslora=config.read(bool, "use_rslora", default=False),
        use_dora=config.read(bool, "use_dora", default=False),
        fan_in_fan_out=config.read(bool, "fan_in_fan_out", default=False),
        adapts_experts=_adapts_experts(config),
        invocation_tokens=tuple(config.read_list(int, "alora_invocation_tokens") or ()),
        token_indices=_token_indices(config, is_by_name=isinstance(values.get("trainable_token_indices"), Mapping)),
    )
    for key, is_used in (("use_dora", peft.use_dora), ("lora_bias", has_bias)):
        if is_used and peft.adapts_experts:
            raise config.unsupported(f"{key} with target_parameters: {NOT_OF_EXPERTS}", f"Train it without {key}.")
    config.refuse_any_unread(HARMLESS.keys())
    return peft


def _check_init(config: ConfigReader) -> None:
    if config.holds("init_lora_weights", True) or config.holds("init_lora_weights", False):
        return
    init = config.read(str, "init_lora_weights", default=INITS[0])
    if init.lower().startswith(CHANGES_BASE):
        raise config.unsupported(
            f"init_lora_weights = {init!r}",
            "It has changed the weights of the base model, too. Convert the adapter with PEFT: "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…).",
        )
    if init not in INITS:
        raise config.unsupported(f"init_lora_weights = {init!r}", "It is not known if it changes the base model.")


def _adapts_experts(config: ConfigReader) -> bool:
    names = config.read_list(str, "target_parameters") or []
    for name in names:
        if name.rpartition(".")[2] not in (GATE_UP, DOWN):
            raise config.unsupported(
                f"target_parameters has {name!r}", f"{GATE_UP} and {DOWN} of experts can be used, and target_modules."
            )
    return bool(names)


def _patterns(config: ConfigReader, key: str) -> dict[re.Pattern[str], float]:
    """Reads regular expression of the end of a name → number; refuses expressions that could take long to match."""
    section = config.section(key)
    if section is None:
        return {}
    if len(section.names()) > MAX_PATTERNS:
        raise config.unsupported(f"{key} has {len(section.names())} entries", f"At most {MAX_PATTERNS} are possible.")
    return {_compiled(config, key, pattern): section.read(float, pattern) for pattern in section.names()}


def _compiled(config: ConfigReader, key: str, pattern: str) -> re.Pattern[str]:
    repeats = sum(map(pattern.count, "*+{"))
    if len(pattern) > MAX_PATTERN_CHARS or repeats > MAX_PATTERN_REPEATS or re.search(r"\)[*+{]", pattern):
        raise config.unsupported(
            f"{key} has the pattern {pattern[:80]!r}",
            f"It could take long to match: {MAX_PATTERN_CHARS} characters and {MAX_PATTERN_REPEATS} repetition are "
            "possible, and none of a group.",
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise config.error(f"{key} has {pattern[:80]!r}, which is no regular expression: {error}") from error


def _first_match(patterns: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def _whole(config: ConfigReader, rank: float) -> int:
    if rank < 1 or rank != int(rank):
        raise config.error(f"rank_pattern has the rank {rank:g}, which is no whole number above 0")
    return int(rank)


def _token_indices(config: ConfigReader, *, is_by_name: bool) -> dict[str, tuple[int, ...]]:
    key = "trainable_token_indices"
    section = config.section(key) if is_by_name else None
    if section is None:
        ids = config.read_list(int, key)
        return {} if ids is None else {"": tuple(ids)}
    return {name: tuple(section.read_list(int, name) or ()) for name in section.names()}
