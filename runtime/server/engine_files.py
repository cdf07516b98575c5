"""The engine files of a server: their names, and what is checked before it starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from enginewright.checkpoint_ref import refuse_checkpoint
from enginewright.errors import EngineError, NoCodeForMachineError, NotEnoughMemoryError, UsageError
from enginewright.printable import printable
from enginewright.runtime import env
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.executor import choose_isa
from enginewright.runtime.device.devices import check_device, open_engine
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.served_engine import EngineInfo, ServedEngine
from enginewright.runtime.speculation.methods import plan_engine_memory
from enginewright.targets import CPU

SUFFIX = ".engine"  # of engine files in a folder
UNLIMITED = 1 << 62  # bytes


def files_of(given: Sequence[str | Path]) -> list[str | Path]:
    """Replaces folders by the engine files in them.

    Raises:
        UsageError: a folder has none.
    """
    files: list[str | Path] = []
    for path in given:
        found: Sequence[str | Path] = sorted(Path(path).glob(f"*{SUFFIX}")) if os.path.isdir(path) else [path]
        if not found:
            refuse_checkpoint(path)
            raise UsageError(f"there is no engine in {path}", f"no name of a file there ends in {SUFFIX}")
        files += found
    return files


def names_alone(model: str, path: str | Path, config: ServerConfig) -> Sequence[str]:
    """Names in requests of a server's only engine: those of the config, or its model's and its file's.

    Args:
        model: the model's name in the file.
        path: the engine file.
        config: the server's settings.
    """
    return config.served_model_names or tuple(dict.fromkeys((model, printable(Path(path).stem))))


def closed_engines(
    paths: Sequence[str | Path], config: ServerConfig, limits: RuntimeConfig, memory: int
) -> list[ServedEngine]:
    """Engines that are closed, and opened by requests.

    They are named after their files, with escapes for characters that are not printable; a single one is named as
    by `names_alone`.

    Args:
        paths: the engine files.
        config: the server's settings.
        limits: limits of each engine.
        memory: bytes that open engines may take together.

    Raises:
        UsageError: two have the same name, the limits do not fit one, or a path is mistyped.
        NotEnoughMemoryError: the KV cache does not hold a sequence of one, or none fits the memory.
        EngineError: the only one cannot be opened.
    """
    check_device(limits.device)
    engines: list[ServedEngine] = []
    too_large: list[NotEnoughMemoryError] = []
    for path in paths:
        engine = ServedEngine((printable(Path(path).stem),), Path(path), None)
        engines.append(engine)
        try:
            opened = open_engine(path, limits.device)
        except EngineError as error:
            if len(paths) == 1 or _is_mistyped(path):
                raise
            engine.refuse(error)
            continue
        with opened:
            try:
                info = EngineInfo.of(opened, limits)
            except NoCodeForMachineError as error:
                if len(paths) == 1:
                    raise
                engine.refuse(error)
                continue
            if len(paths) == 1:
                engine.names = names_alone(info.name, path, config)
            engine.update(info)
            _check_options(opened, config, limits)
            if (why := _why_too_large(opened, limits, memory)) is not None:
                too_large.append(why)
                engine.refuse(why)
    if too_large and all(engine.has_failed for engine in engines):
        raise too_large[0]
    _check_names(engines, config)
    return engines


def _is_mistyped(path: str | Path) -> bool:
    """True if a path that cannot be opened does not name an engine file at all, not even a broken one."""
    return Path(path).suffix != SUFFIX or not os.path.lexists(path)


def _check_options(engine: Engine, config: ServerConfig, limits: RuntimeConfig) -> None:
    """Refuses options at the start with which no request to an engine could ever be answered.

    Raises:
        UsageError: there is no such instruction set, or the engine runs on a GPU without --memory.
        NotEnoughMemoryError: the KV cache does not hold one sequence of the maximum length.
        NoCodeForMachineError: this CPU does not have the requested instruction set.
    """
    if engine.target == CPU:
        choose_isa(limits.isa or env.cpu_isa())
    elif config.memory is None:
        why = "the GPU memory that engines may take together must be given"
        raise UsageError("engines that are opened on demand need --memory on a GPU", why)
    if limits.kv_cache_memory is None:
        return
    try:
        plan_engine_memory(engine, limits, UNLIMITED)
    except NotEnoughMemoryError as error:
        given = format_bytes(limits.kv_cache_memory)
        what = f"{engine.file.path} needs more than --kv-cache-memory {given}"
        raise NotEnoughMemoryError(what, f"{error.what}, {error.why}", error.fix) from error


def _why_too_large(engine: Engine, limits: RuntimeConfig, memory: int) -> NotEnoughMemoryError | None:
    """Error of an engine that does not fit the memory even if no other one is open; None if it fits.

    Raises:
        UsageError: the engine does not have the draft model that the limits name.
    """
    weights = f"its weights take {format_bytes(engine.weight_bytes)}"
    try:
        _, nbytes = plan_engine_memory(engine, limits, memory)
    except NotEnoughMemoryError as error:
        takes = f"{weights}, and {error.what}"
    else:
        if nbytes <= memory:
            return None
        takes = f"{weights}, and it needs {format_bytes(nbytes)} in all"
    return NotEnoughMemoryError(
        f"{engine.file.path} does not fit the memory that engines may take together, {format_bytes(memory)}",
        takes,
        "Use a larger --memory, or a smaller --max-model-len, --max-num-batched-tokens or --kv-cache-memory.",
    )


def _check_names(engines: Sequence[ServedEngine], config: ServerConfig) -> None:
    if len(engines) > 1 and config.served_model_names:
        raise UsageError("--served-model-name names one engine", f"here are {len(engines)}, named after their files")
    seen: dict[str, ServedEngine] = {}
    for engine in engines:
        other = seen.setdefault(engine.names[0], engine)
        if other is not engine:
            raise UsageError(
                f"two engines have the name {engine.names[0]}",
                f"{other.path} and {engine.path}",
                "Rename one of the files.",
            )
