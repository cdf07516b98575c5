"""The assembler's log of a kernel that NVRTC compiles: registers, spills and shared memory."""

from pathlib import Path

from cuda.bindings import nvrtc

from enginewright.builder.cuda.compile import SOURCES
from enginewright.builder.cuda.nvrtc import OPTIONS


def assembler_log(source: str, expression: str, sm: str) -> str:
    """Compiles a kernel; gives the assembler's log. source: C++, which may include our headers and those of tests/."""
    headers = {path.name: path.read_text() for path in (*SOURCES.glob("*.cuh"), *Path(__file__).parent.glob("*.cuh"))}
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"", len(names), texts, names)
    nvrtc.nvrtcAddNameExpression(program, expression.encode())
    options = [b"-arch=" + sm.encode(), b"--ptxas-options=-v", *(option.encode() for option in OPTIONS)]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options) == (0,)
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode()
