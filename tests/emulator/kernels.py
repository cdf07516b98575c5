"""CUDA kernels on the CPU: csrc/cuda compiled by g++ against emulated.h, and launched on the fibers of emulator.cpp."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np

EMULATOR = Path(__file__).parent
ROOT = EMULATOR.parent.parent
SOURCES = ROOT / "csrc/cuda"
FOLDERS = (SOURCES, EMULATOR)  # of headers
BUILT = ROOT / "build/emulated"
SANITIZE = os.environ.get("ENGINEWRIGHT_SANITIZE", "")  # as setup.py has it; `make sanitize` preloads what it needs
FLAGS = (
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Winvalid-pch",
    "-U_FORTIFY_SOURCE",
    *(f"-I{folder.relative_to(ROOT)}" for folder in FOLDERS),
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
SCHEDULES = ("forward", "reverse", "random")

Instance = tuple[str, str]  # a header of csrc/cuda, and the expression of a kernel in it (plugins/kernel.py)
# A pointer to an array (or none), an int32, a float, or what ctypes has.
Argument = np.ndarray | int | float | ctypes._SimpleCData | None


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int32 * 3),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int64),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
    ]


class EmulationError(Exception):
    """A kernel did something that is an error, or undefined, on a GPU."""


class EmulatedKernels:
    """Kernels of one library. sm: the architecture that they are compiled for. library: one that has them."""

    def __init__(self, instances: Sequence[Instance], sm: int = 80, library: Path | None = None) -> None:
        self._library = ctypes.CDLL(str(library or compiled_library(tuple(instances), sm)))
        self.index = {expression: self._library.enginewright_index(expression.encode()) for _, expression in instances}
        for name in ("enginewright_launch", "enginewright_sites"):
            getattr(self._library, name).restype = ctypes.c_char_p

    def launch(
        self,
        expression: str,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        *arguments: Argument,
        schedule: str = "forward",
        seed: int = 0,
    ) -> None:
        """Runs a kernel to its end.

        Raises:
            EmulationError: threads that wait for ever, misaligned addresses, and the like.
        """
        whole = (ctypes.c_int32 * 3)(*grid, *[1] * (3 - len(grid)))
        launch = _Launch(whole, threads, shared_bytes, SCHEDULES.index(schedule), seed)
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        why = self._library.enginewright_launch(self.index[expression], ctypes.byref(launch), addresses)
        if why:
            raise EmulationError(why.decode())

    @staticmethod
    def are_for(sm: int) -> bool:
        """Tells if kernels of one architecture alone can run."""
        return True

    @property
    def sites(self) -> list[str]:
        """Barriers and waits that were reached so far, each as "file:line"."""
        return self._library.enginewright_sites().decode().split()

    @contextmanager
    def without(self, site: str) -> Iterator[None]:
        """Makes one barrier or wait do nothing within the context."""
        self._library.enginewright_disable_site(site.encode())
        try:
            yield
        finally:
            self._library.enginewright_disable_site(b"")


def _value(argument: Argument) -> ctypes._SimpleCData:
    match argument:
        case None:
            return ctypes.c_void_p(None)
        case ctypes._SimpleCData():
            return argument
        case np.ndarray():
            return ctypes.c_void_p(argument.ctypes.data)
        case float():
            return ctypes.c_float(argument)
        case _:
            return ctypes.c_int32(argument)


@cache
def compiled_library(instances: tuple[Instance, ...], sm: int) -> Path:
    return _built(_program(instances), _linked(sm), ".so")


def libraries_with(instances: Sequence[Instance], sm: int) -> list[Path]:
    """A library with each kernel. Those without one get one together, in a third of the time of one for each."""
    libraries = {one: _output(_program([one]), ["libraries_with", *_linked(sm)], ".so") for one in instances}
    if missing := [one for one, library in libraries.items() if not library.exists()]:
        together = compiled_library(tuple(missing), sm)
        for one in missing:
            with suppress(FileExistsError):  # another process was faster
                libraries[one].hardlink_to(together)
    return list(libraries.values())


def _linked(sm: int) -> list[str]:
    """Options with which a program becomes a library with the emulator in it."""
    defined = f"-DENGINEWRIGHT_EMULATED={sm}"
    emulator = _built((EMULATOR / "emulator.cpp").read_text(), ["-c"], ".o")
    # What all programs begin with takes longer than most kernels; precompiled, as long as one of them.
    header = _built('#include "device.cuh"\n#include "emulator.h"\n', [defined, "-xc++-header"], ".h.gch")
    return [defined, "-include", _relative(header.with_suffix("")), "-shared", _relative(emulator)]


def _program(instances: Sequence[Instance]) -> str:
    includes = "".join(f'#include "{source}"\n' for source in dict.fromkeys(source for source, _ in instances))
    kernels = "".join(f'    {{"{expression}", emulator::Caller<{expression}>::call}},\n' for _, expression in instances)
    return (
        f'{includes}#include "emulator.h"\n'
        f"namespace enginewright {{\nconst emulator::Kernel kernels[] = {{\n{kernels}    {{}}}};\n}}\n"
    )


def _output(program: str, options: Sequence[str], suffix: str) -> Path:
    """Path of what is compiled from a program, named after all that it depends on, wherever this clone is."""
    content = [program, *_options(options), *_headers(program)]
    return BUILT / (hashlib.sha256("\0".join(content).encode()).hexdigest()[:32] + suffix)


def _headers(program: str) -> list[str]:
    """The texts of all headers that a program includes, whatever #if says, in the order of their names."""
    texts: dict[str, str] = {}
    pending = _INCLUDE.findall(program)
    while pending:
        if (name := pending.pop()) not in texts:
            texts[name] = _text(name)
            pending += _INCLUDE.findall(texts[name])
    return [texts[name] for name in sorted(texts)]


@cache
def _text(header: str) -> str:
    return next(path for folder in FOLDERS if (path := folder / header).exists()).read_text()


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _options(options: Sequence[str]) -> list[str]:
    return [*FLAGS, *([f"-fsanitize={SANITIZE}", "-g"] if SANITIZE else []), *options]


def _built(program: str, options: Sequence[str], suffix: str) -> Path:
    """Compiles a program with g++, once for the same sources and options, in the first process that needs it."""
    output = _output(program, options, suffix)
    if output.exists():
        return output
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        source, partial = Path(folder, "program.cpp"), Path(folder, output.name)
        source.write_text(program)
        compiler = shutil.which("g++")
        assert compiler is not None, "g++ compiles CUDA kernels for the CPU; there is none"
        command = [compiler, *_options(options), "-o", _relative(partial), _relative(source)]
        subprocess.run(command, cwd=ROOT, check=True)
        partial.replace(output)
    return output


# What tests of kernels take: in emulation, or on the GPU.
if os.environ.get("ENGINEWRIGHT_TEST_DEVICE") == "cuda":
    from tests.helpers.gpu_kernels import GpuKernels as Kernels
else:
    Kernels = EmulatedKernels  # type: ignore[misc,assignment]
