"""Compiles kernels for GPU architectures, or takes them from the cache."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import msgspec

import enginewright
from enginewright.builder.cuda import nvrtc, triton_kernel
from enginewright.builder.cuda.cache import CompileCache
from enginewright.builder.cuda.kernel import Compiled, Failed, Instance, Job
from enginewright.builder.cuda.workers import compile_all
from enginewright.errors import EngineError, UsageError
from enginewright.runtime import env
from enginewright.runtime.device.machine import num_cores
from enginewright.targets import CUDA, parse_targets
from enginewright.triton_instance import TritonInstance

Kernel = Instance | TritonInstance
_COMPILERS: Mapping[type[Kernel], ModuleType] = {Instance: nvrtc, TritonInstance: triton_kernel}
SOURCES = Path(enginewright.__file__).parent / "csrc" / CUDA
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def compile_each(
    wanted: Sequence[tuple[str, Kernel]], jobs: int | None = None, *, sources: Path = SOURCES, cache: Path | None = None
) -> dict[tuple[str, Kernel], Compiled]:
    """Compiles kernels; the code is the same on every machine.

    Args:
        wanted: (architecture, kernel); architectures are from `targets.SMS`, or "ptx".
        jobs: maximum of processes; None is one for each core.
        sources: folder of the kernels' sources.
        cache: folder of compiled kernels; None is the user's.

    Returns:
        (architecture, kernel) → its code.

    Raises:
        UsageError: the compiler is not installed, or an architecture is unknown.
        EngineError: a kernel does not compile.
    """
    parse_targets(f"{CUDA}:{sm}" for sm, _ in wanted)
    store = CompileCache(cache or env.cache_folder() / CUDA)
    texts = {source: _texts(source, sources) for source in {kernel.source for _, kernel in wanted}}
    tasks = {(sm, kernel): Job(kernel, sm, texts[kernel.source]) for sm, kernel in wanted}
    keys = {task: _key(job) for task, job in tasks.items()}
    compiled_of = {task: compiled for task, key in keys.items() if (compiled := store.get(key)) is not None}
    missing = [task for task in tasks if task not in compiled_of]
    with closing(compile_all([tasks[task] for task in missing], jobs or num_cores())) as results:
        for task, result in zip(missing, results, strict=True):
            if isinstance(result, Failed):
                raise _refusal(*task, result)
            store.put(keys[task], result)
            compiled_of[task] = result
    return compiled_of


def _texts(source: str, sources: Path) -> dict[str, str]:
    """Reads a header and all its includes from this folder, whatever #if says: name → text."""
    texts: dict[str, str] = {}
    pending = [source]
    while pending:
        name = pending.pop()
        if name in texts:
            continue
        try:
            texts[name] = (sources / name).read_text()
        except FileNotFoundError:
            if name == source:
                raise EngineError(f"there is no kernel {source}", f"{sources} has no such file") from None
            continue  # the compiler has headers of its own
        pending.extend(_INCLUDE.findall(texts[name]))
    return texts


def check_compilers(kernels: Iterable[Kernel]) -> None:
    """Checks, before work that takes minutes, that these kernels can be compiled here.

    Raises:
        UsageError: a compiler is not installed, or has another version.
    """
    for kind in dict.fromkeys(type(kernel) for kernel in kernels):
        _versions(_COMPILERS[kind])


def _key(job: Job) -> str:
    """Hashes all inputs of a kernel; cached kernels do not need the compiler itself."""
    compiler = _COMPILERS[type(job.instance)]
    inputs = [job, compiler.OPTIONS, _versions(compiler)]
    return hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()


def _versions(compiler: ModuleType) -> dict[str, str]:
    """Returns the versions of a compiler's wheels, which must have the prefixes in its WHEELS."""
    found = {wheel: _version(wheel) for wheel in compiler.WHEELS}
    for wheel, start in compiler.WHEELS.items():
        given = found[wheel]
        if given is None or not given.startswith(start):
            why = f"{wheel} is not installed" if given is None else f"{wheel} is {given}, and must be {start}*"
            raise UsageError("GPU kernels cannot be compiled", why, compiler.REMEDY)
    return {wheel: str(given) for wheel, given in found.items()}


@cache
def _version(wheel: str) -> str | None:
    try:
        return version(wheel)
    except PackageNotFoundError:
        return None


def _refusal(sm: str, kernel: Kernel, failed: Failed) -> EngineError:
    what = f"{kernel.expression} of {kernel.source} does not compile for {sm}"
    return EngineError(what, failed.log.strip(), "This is a fault of enginewright: please report it with this text.")
