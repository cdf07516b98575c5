"""Compiles one kernel in CUDA C++ with NVRTC, from the wheel of the extra [cuda-build].

It calls NVRTC itself, since cuda.core needs a driver even for PTX. No toolkit's headers are used: a kernel depends on
our own files alone, wherever it is compiled.
"""

from collections.abc import Mapping
from typing import Any

from enginewright.builder.cuda.cubin import resources
from enginewright.builder.cuda.kernel import Compiled, Failed
from enginewright.targets import PTX

# Wheel → prefix of its version. PTX of a newer NVRTC does not run with the drivers of this one.
WHEELS = {"nvidia-cuda-nvrtc": "13.0.", "cuda-bindings": ""}
REMEDY = "Install it with: pip install 'enginewright[cuda-build]'"
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    "--fmad=false",  # kernels ask for fused operations: results do not depend on the compiler's choices
    "--frandom-seed=enginewright",  # otherwise local names have the number of the process in them
)
_RELEASE = (13, 0)
_PTX_ARCHITECTURE = "compute_80"


def compile_cpp(source: str, expression: str, sm: str, texts: Mapping[str, str]) -> Compiled | Failed:
    """Compiles a kernel. Nothing is read from a folder, so that no path gets into the code.

    Args:
        source: name of the header.
        expression: name of the specialization.
        sm: architecture.
        texts: the header and what it includes by `#include "…"`, name → text.
    """
    from cuda.bindings import nvrtc

    release = _checked(*nvrtc.nvrtcVersion())
    if release != _RELEASE:
        return Failed("this is NVRTC {}.{}, not {}.{}".format(*release, *_RELEASE))
    options = [*OPTIONS, f"--gpu-architecture={_PTX_ARCHITECTURE if sm == PTX else sm}"]
    names, contents = [name.encode() for name in texts], [text.encode() for text in texts.values()]
    start = f'#include "{source}"\nusing namespace enginewright;\n'.encode()
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


def _checked(status: Any, *result: Any) -> Any:
    """Returns the result of a call of NVRTC without its status. Raises RuntimeError if it failed."""
    if status:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return result[0] if len(result) == 1 else result


def _text(program: Any, size: Any, get: Any) -> bytes:
    """Copies an output of NVRTC."""
    data = bytes(_checked(*size(program)))
    _checked(*get(program, data))
    return data
