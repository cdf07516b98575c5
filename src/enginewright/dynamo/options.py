"""Options of the worker: Dynamo's own, with its environment variables (DYN_…), and the limits of an engine."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.runtime import parse_endpoint

from enginewright.errors import UsageError, shorten
from enginewright.runtime.config import BYTES, FLAGS, TEXTS, RuntimeConfig
from enginewright.runtime.count import parse_bytes, parse_count

# Part of the work by Dynamo's role. Its encoders are for images, which engines do not read.
KV_ROLES = {
    DisaggregationMode.AGGREGATED.value: None,
    DisaggregationMode.PREFILL.value: "prefill",
    DisaggregationMode.DECODE.value: "decode",
}
# Limits that the worker sets by itself.
OWN_LIMITS = ("kv_events", "kv_events_replay", "kv_events_topic", "kv_role")
DEFAULTS = {"prefill_chunk_size": 96}  # where a server's default is not RuntimeConfig's
# Options of Dynamo's for other engines, with the values that leave them unset.
REFUSED = {
    "connector": [],
    "fpm_trace": False,
    "multimodal_embedding_cache_capacity_gb": 0,
    "multimodal_embedding_cache_publisher": False,
    "output_modalities": ["text"],
}


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker."""

    engine: Path  # engine file
    names: tuple[str, ...]  # names of the model in requests; empty: its name in the engine file
    verify: bool  # whether to check the hashes of the weights
    model_files: Path | None  # folder for the files that frontends read; None: one in the user's cache folder
    drain_seconds: float  # seconds that running requests may take to finish once the worker ends
    limits: RuntimeConfig  # limits of the engine
    dynamo: DynamoRuntimeConfig  # options of Dynamo's runtime
    mode: DisaggregationMode  # part of each answer that the worker computes


def parse_options(arguments: Sequence[str] | None) -> WorkerOptions:
    """Reads the options of a worker.

    Args:
        arguments: those of the command line; None: of this process.

    Raises:
        UsageError: a value is wrong, or an option is for other engines.
    """
    parser = argparse.ArgumentParser(
        prog="python -m enginewright.dynamo",
        description="Answers requests of NVIDIA Dynamo's frontends with an engine (docs/dynamo.md).",
        allow_abbrev=False,
    )
    parser.add_argument("engine", metavar="ENGINE", type=Path, help="Engine file that `engine build` wrote.")
    parser.add_argument(
        "--served-model-name",
        dest="names",
        action="append",
        default=[],
        help="Name of the model in requests, by default the name in the engine file. Further ones are aliases.",
    )
    parser.add_argument(
        "--disaggregation-mode",
        choices=list(KV_ROLES),
        default=DisaggregationMode.AGGREGATED.value,
        help="Part of each answer that the worker computes: agg (all of it), prefill or decode. The last two need "
        "--kv-secret-file.",
    )
    parser.add_argument("--verify", action="store_true", help="Check the hashes of the weights before the start.")
    parser.add_argument(
        "--model-files",
        metavar="FOLDER",
        type=Path,
        help="Folder for the tokenizer's files, which frontends read, by default one in $XDG_CACHE_HOME. It must have "
        "the same name for all workers of a model, or frontends use only the first of them.",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="Seconds that running requests may take to finish after SIGTERM and Dynamo's grace period.",
    )
    _add_limits(parser.add_argument_group("Limits", "They are those of `engine run`, whose --help describes them."))
    DynamoRuntimeArgGroup().add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    mode = DisaggregationMode(given.pop("disaggregation_mode"))
    limits = {name: given.pop(name) for name in _limit_names()} | {"kv_role": KV_ROLES[mode.value]}
    own = {name: given.pop(name) for name in ("engine", "names", "verify", "model_files", "drain_seconds")}
    return WorkerOptions(
        engine=own["engine"],
        names=tuple(own["names"]),
        verify=own["verify"],
        model_files=own["model_files"],
        drain_seconds=own["drain_seconds"],
        limits=RuntimeConfig(**limits),
        dynamo=_dynamo_config(given, mode),
        mode=mode,
    )


def _limit_names() -> list[str]:
    return [field.name for field in fields(RuntimeConfig) if field.name not in OWN_LIMITS]


def _add_limits(group: Any) -> None:
    for field in fields(RuntimeConfig):
        name, default = field.name, DEFAULTS.get(field.name, field.default)
        option = f"--{name.replace('_', '-')}"
        if name in OWN_LIMITS:
            continue
        if name in FLAGS:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
            continue
        parse = parse_bytes if name in BYTES else str if name in TEXTS else parse_count
        group.add_argument(option, type=parse, default=default)


def _dynamo_config(given: dict[str, Any], mode: DisaggregationMode) -> DynamoRuntimeConfig:
    for name, unset in REFUSED.items():
        if given[name] != unset:
            what = f"--{name.replace('_', '-')} is {shorten(given[name])}"
            raise UsageError(what, "the option is for other engines", "Leave it out.")
    config = DynamoRuntimeConfig.from_cli_args(argparse.Namespace(**given))
    try:
        config.validate()
        component = "prefill" if mode is DisaggregationMode.PREFILL else "backend"
        address = config.endpoint or f"{config.namespace}.{component}.generate"
        config.namespace, config.component, config.endpoint = parse_endpoint(address)
    except ValueError as error:
        raise UsageError("Dynamo refuses the options", str(error)) from error
    return config
