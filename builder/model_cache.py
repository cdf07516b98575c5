"""Builds the engine of a checkpoint once (`engine run MODEL`), and prepares an adapter once (`--lora-modules`).

A folder of the cache is named after the checkpoint and the options, and holds one engine or adapter. Heavy imports wait
until there is something to build: a second start needs none of them.
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from enginewright import __version__
from enginewright.checkpoint_ref import HUB_ID, find_checkpoint
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, NotEnoughMemoryError, UsageError
from enginewright.printable import printable_lines
from enginewright.runtime import env
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cuda.device import CudaDevice, capability_of, num_gpus
from enginewright.runtime.device.machine import free_memory
from enginewright.targets import CPU, CUDA, SMS, choose_code, parse_targets

if TYPE_CHECKING:
    from enginewright.builder.checkpoint import Checkpoint

FOLDER, ADAPTERS = "engines", "adapters"  # folders in the cache
# suffixes of files that an engine may depend on
SOURCE_SUFFIXES = (".gguf", ".jinja", ".json", ".model", ".safetensors")
WEIGHT_SHARE = 0.75  # share of the memory for weights; KV cache and activations have the rest
# Target → methods, the closest to the model first, with the bytes of a weight.
CHOICES = {
    CPU: (("int8-wo", 1.1), ("int4-awq", 0.65)),
    CUDA: (("bf16", 2.0), ("int8-wo", 1.1), ("int4-awq", 0.65)),
}


def engine_files(
    given: Sequence[Path], *, quant: str | None, device: str, memory: int | None, rebuild: bool
) -> Sequence[Path]:
    """Replaces checkpoints by their engines; engine files, and folders of them, stay as they are.

    Args:
        given: engine files, folders and checkpoints.
        quant: as in `cached_engine`.
        device: as in `cached_engine`.
        memory: as in `cached_engine`.
        rebuild: as in `cached_engine`.

    Raises:
        UsageError: an option is about builds, and there is no checkpoint; or as in `cached_engine`.
    """
    checkpoints = {
        path
        for path in given
        if find_checkpoint(path) is not None and not (path.is_dir() and any(path.glob("*.engine")))
    }
    if not checkpoints and (quant is not None or rebuild):
        name = "--rebuild" if quant is None else "--quant"
        raise UsageError(
            f"{name} is for models", "all given files are already engines", "Leave it out, or name a MODEL."
        )
    return [
        cached_engine(str(path), quant=quant, device=device, memory=memory, rebuild=rebuild)
        if path in checkpoints
        else path
        for path in given
    ]


def cached_engine(
    model: str, *, quant: str | None = None, device: str = "auto", memory: int | None = None, rebuild: bool = False
) -> Path:
    """Returns the engine of a checkpoint, which is built if the cache has none; stderr shows what is done.

    A model of the hub is identified by its name and revision: it is built again only with `rebuild`. Files are
    identified by their names, sizes and times.

    Args:
        model: a checkpoint's folder, a GGUF file, or a hub id.
        quant: a method; None is the closest to the model whose weights fit the memory.
        device: device that the engine will run on, as in `open_engine`.
        memory: bytes that it may use; None is the free memory of the device.
        rebuild: True builds it even if the cache has it.

    Raises:
        UsageError: as in a build.
        UnsupportedModelError: as in a build.
        QualityGateError: as in a build.
        EngineError: as in a build.
        NotEnoughMemoryError: no method makes it small enough.
    """
    target = _target(device)
    identity = {"source": _identity(model), "quant": quant, "target": target, "version": __version__}
    folder = _folder(FOLDER, identity)
    with _locked(folder, model):
        found = sorted(folder.glob("*.engine"))
        if found and not rebuild:
            _say(f"{model} was built before: {found[0]} (--rebuild builds it again)")
            return found[0]
        built = _build(model, quant, target, memory, folder)
        for old in found:
            if old != built:
                old.unlink()
        return built


def adapter_files(modules: Sequence[str], engines: Sequence[Path]) -> tuple[str, ...]:
    """Replaces adapters that PEFT has saved by their prepared files.

    Args:
        modules: NAME=ADAPTER of each, which is an adapter file, a folder, or an adapter of the hub.
        engines: files and folders of engines that are served.

    Returns:
        NAME=FILE of each.

    Raises:
        UsageError: an adapter is not prepared, and there is not exactly one engine; or as in `prepared_adapter`.
        UnsupportedModelError: as in `prepared_adapter`.
        EngineError: as in `prepared_adapter`.
    """
    files = []
    for module in modules:
        name, equals, given = module.partition("=")
        if _is_prepared(given):
            files.append(module)
            continue
        if len(engines) != 1 or engines[0].is_dir():
            why = "it is prepared for one engine, and there may be several"
            raise UsageError(f"the adapter {given} cannot be prepared", why, "Prepare it with `engine adapter`.")
        files.append(f"{name}{equals}{prepared_adapter(given, engines[0])}")
    return tuple(files)


def prepared_adapter(given: str, engine: Path) -> Path:
    """Prepares an adapter that PEFT has saved, if the cache does not have it; stderr shows what is done.

    Args:
        given: a folder, which is identified by the names, sizes and times of its files, or the hub id of an adapter.
            Or a GGUF file. Anything else is an adapter file, whose path is returned.
        engine: the engine file that it is for.

    Raises:
        UsageError: there is no such adapter, or the engine takes none.
        UnsupportedModelError: as in `prepare`.
        EngineError: as in `prepare`.
    """
    if _is_prepared(given):
        return Path(given)
    with EngineFile.open(engine, check_sections=False) as file:
        content = file.manifest.content_hash
    folder = _folder(ADAPTERS, {"source": _identity(given), "engine": content, "version": __version__})
    with _locked(folder, given):
        for found in folder.glob("*.lora"):
            return found

        from enginewright.builder.commands import prepare_adapter

        name = Path(given).resolve().name.partition("@")[0].removesuffix(".gguf")
        path = folder / f"{name}.lora"
        prepare_adapter(given, engine, path)
        _say(f"{given} is prepared for {engine}: {path} takes {format_bytes(path.stat().st_size)}")
        return path


def _is_prepared(given: str) -> bool:
    """True of a path that is no folder and no GGUF file: an adapter file, though it may be missing."""
    path = Path(given)
    is_hub_id = HUB_ID.fullmatch(given) is not None and path.suffix != ".lora" and not path.exists()
    return not path.is_dir() and not is_hub_id and path.suffix.lower() != ".gguf"


def _folder(kind: str, identity: Mapping[str, object]) -> Path:
    key = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return env.cache_folder() / kind / key


def _build(model: str, quant: str | None, target: str, memory: int | None, folder: Path) -> Path:
    from enginewright.builder.build import BuildConfig, build_engine, chosen_quant, default_output
    from enginewright.builder.checkpoint import open_checkpoint
    from enginewright.builder.checkpoint.quantized import format_name
    from enginewright.builder.console import ConsoleProgress
    from enginewright.builder.models import check_config

    with ConsoleProgress() as progress:
        progress.phase("open the checkpoint")
        checkpoint = open_checkpoint(model, check_config=check_config)
        stored_as = format_name(checkpoint)
        if quant is None and stored_as is None:
            quant = _fitting_method(checkpoint, target, memory)
        config = BuildConfig(quant=chosen_quant(quant), targets=parse_targets([target]))
        path = folder / default_output(checkpoint, config)
        build_engine(checkpoint, config, path, progress)
    _say(f"{model} is built for {target}, with {quant or stored_as}: {path} takes {format_bytes(path.stat().st_size)}")
    return path


def _fitting_method(checkpoint: "Checkpoint", target: str, memory: int | None) -> str:
    """Chooses the method closest to the model whose weights fit the memory."""
    on_gpu = target != CPU
    if memory is None:
        memory = _free_gpu_memory() if on_gpu else free_memory()
    num_weights = sum(prod(info.shape) for info in checkpoint.tensors.values())
    choices = CHOICES[CUDA if on_gpu else CPU]
    for method, weight_bytes in choices:
        if num_weights * weight_bytes <= memory * WEIGHT_SHARE:
            size = format_bytes(int(num_weights * weight_bytes))
            _say(f"{checkpoint.name} is built with {method}: {size} of weights, and {format_bytes(memory)} of memory")
            return method
    needed = int(num_weights * choices[-1][1] / WEIGHT_SHARE)
    raise NotEnoughMemoryError(
        f"{checkpoint.name} takes {format_bytes(needed)} with {choices[-1][0]}",
        f"{format_bytes(memory)} are available for it",
        "Choose a method with --quant, or a smaller model.",
    )


def _target(device: str) -> str:
    """Chooses the target: this machine's GPU, if it is requested and there is code for it, or the CPU."""
    kind, _, index = device.partition(":")
    if kind == CPU or num_gpus() == 0:
        return CPU
    return f"{CUDA}:{choose_code(capability_of(int(index or 0)), SMS)}"


def _free_gpu_memory() -> int:
    device = CudaDevice(0)
    try:
        return device.free_bytes
    finally:
        device.close()


def _identity(model: str) -> object:
    """Identifies a checkpoint without reading it: a hub id, or files with their sizes and times."""
    path = Path(model)
    if not path.exists():
        return model
    files = sorted(one for one in path.iterdir() if one.suffix in SOURCE_SUFFIXES) if path.is_dir() else [path]
    stats = [(str(one.resolve()), one.stat()) for one in files if one.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


@contextmanager
def _locked(folder: Path, model: str) -> Iterator[None]:
    """Makes a folder, and waits until no other process builds into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror or str(error)
        raise EngineError(f"{folder} cannot be made", why, "XDG_CACHE_HOME names another folder.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{model} is being built by another process: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _say(text: str) -> None:
    print(printable_lines(text), file=sys.stderr, flush=True)
