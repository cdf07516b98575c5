"""Compiles one kernel in CUDA C++ with NVRTC, as the wheels of the extra [cuda-build] have it.

It calls NVRTC itself, since cuda.core asks for a driver before it makes PTX.
"""

from collections.abc import Mapping
from importlib.metadata import distribution
from typing import Any

from enginewright.builder.cuda.cubin import resources
from enginewright.builder.cuda.kernel import Compiled, Failed
from enginewright.code import PTX

WHEELS = (  # what of them changes what comes out: the compiler, and its headers
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",  # cuda_bf16.h, cuda_fp16.h, cuda_fp8.h
    "nvidia-cuda-crt",  # what these include
    "nvidia-cuda-cccl",  # nv/target, and the standard library's cuda/std/*
)
OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--fmad=false",  # only where a kernel says so: results do not depend on what the compiler fuses
    "--frandom-seed=enginewright",  # names of what is local to a file have the process's number in them otherwise
)
_RELEASE = (13, 0)  # PTX of a newer one does not run with the drivers of this one
_PTX_ARCHITECTURE = "compute_80"
_INCLUDES = ("nvidia/cu13/include", "nvidia/cu13/include/cccl")


def compile_cpp(source: str, expression: str, sm: str, texts: Mapping[str, str]) -> Compiled | Failed:
    """texts: the header and what it includes by `#include "…"`, name → text. Nothing is read from their folder, so
    that no path of it gets into the code.
    """
    from cuda.bindings import nvrtc

    release = _checked(*nvrtc.nvrtcVersion())
    if release != _RELEASE:
        return Failed("this is NVRTC {}.{}, not {}.{}".format(*release, *_RELEASE))
    options = [*OPTIONS, *(f"--include-path={folder}" for folder in header_folders())]
    options.append(f"--gpu-architecture={_PTX_ARCHITECTURE if sm == PTX else sm}")
    names, contents = [name.encode() for name in texts], [text.encode() for text in texts.values()]
    start = f'#include "{source}"\n'.encode()
    program = _checked(*nvrtc.nvrtcCreateProgram(start, b"enginewright", len(names), contents, names))
    try:
        _checked(*nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status:
            return Failed(_text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode())
        symbol = _checked(*nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
        if sm == PTX:
            return Compiled(_text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), symbol)
        cubin = _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Compiled(cubin, symbol, *resources(cubin, symbol))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def header_folders() -> list[str]:
    """Of the wheels alone, whatever toolkits the machine has: the same headers everywhere."""
    wheel = distribution("nvidia-cuda-runtime")
    return [str(wheel.locate_file(folder)) for folder in _INCLUDES]


def _checked(status: Any, *result: Any) -> Any:
    """What a call of NVRTC returns beside its status."""
    if status:
        raise RuntimeError(f"NVRTC says {status.name}")
    return result[0] if len(result) == 1 else result


def _text(program: Any, size: Any, get: Any) -> bytes:
    """What NVRTC has made, into memory that we give it."""
    data = bytes(_checked(*size(program)))
    _checked(*get(program, data))
    return data
