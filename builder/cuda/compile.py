"""Kernels for GPU architectures: from the cache, or compiled now."""

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
    """(architecture, kernel) → its code, the same bytes on every machine.

    Args:
        wanted: architectures are of `targets.SMS`, or "ptx".
        jobs: processes at most; None takes one a core.
        sources: folder of the kernels' sources.
        cache: folder of what has been compiled before; None takes the user's.

    Raises:
        UsageError: the compiler is not installed, or an architecture is not known.
        EngineError: a kernel does not compile.
    """
    parse_targets(f"{CUDA}:{sm}" for sm, _ in wanted)
    store = CompileCache(cache or env.cache_folder() / CUDA)
    texts = {source: _texts(source, sources) for source in {kernel.source for _, kernel in wanted}}
    todo = {(sm, kernel): Job(kernel, sm, texts[kernel.source]) for sm, kernel in wanted}
    keys = {place: _key(job) for place, job in todo.items()}
    made = {place: compiled for place, key in keys.items() if (compiled := store.get(key)) is not None}
    missing = [place for place in todo if place not in made]
    with closing(compile_all([todo[place] for place in missing], jobs or num_cores())) as answers:
        for place, answer in zip(missing, answers, strict=True):
            if isinstance(answer, Failed):
                raise _refusal(*place, answer)
            store.put(keys[place], answer)
            made[place] = answer
    return made


def _texts(source: str, sources: Path) -> dict[str, str]:
    """A header and all that it includes of this folder, whatever #if says: name → text."""
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
            continue  # one of the compiler's own
        pending.extend(_INCLUDE.findall(texts[name]))
    return texts


def check_compilers(kernels: Iterable[Kernel]) -> None:
    """Check, before what takes minutes, that these kernels can be compiled here.

    Raises:
        UsageError: a compiler is not installed, or is another version.
    """
    for kind in dict.fromkeys(type(kernel) for kernel in kernels):
        _versions(_COMPILERS[kind])


def _key(job: Job) -> str:
    """Of all that goes into a kernel; the compiler itself need not be loaded for what is in the cache."""
    compiler = _COMPILERS[type(job.instance)]
    inputs = [job, compiler.OPTIONS, _versions(compiler)]
    return hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()


def _versions(compiler: ModuleType) -> dict[str, str]:
    """Versions of the wheels that a compiler consists of: its WHEELS says how each has to begin."""
    found = {wheel: _version(wheel) for wheel in compiler.WHEELS}
    for wheel, start in compiler.WHEELS.items():
        given = found[wheel]
        if given is None or not given.startswith(start):
            why = f"{wheel} is not installed" if given is None else f"{wheel} is {given}, and should be {start}*"
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
