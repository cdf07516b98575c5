"""Compiles one kernel in Triton, from the wheel of the extra [cuda-triton]."""

import importlib
import subprocess
import tempfile
from pathlib import Path

from enginewright.builder.cuda.cubin import resources
from enginewright.builder.cuda.kernel import Compiled, Failed
from enginewright.targets import PTX
from enginewright.triton_instance import TritonInstance

WHEELS = {"triton": ""}  # wheel → prefix of its version
REMEDY = (
    "This model's prompts need kernels in Triton. Install it with: pip install 'enginewright[cuda-triton]', or "
    "build with --batch-invariant, which needs none and reads prompts token by token."
)
OPTIONS = {"enable_fp_fusion": False}  # results do not depend on the compiler's choices
# Architecture → the capability whose instructions Triton uses.
_CAPABILITIES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120": 89, PTX: 80}
# For capability 12.0 Triton would make code for sm_120a, which runs there alone. 12.x has the instructions of 8.9.
_ASSEMBLED_AGAIN = ("sm_120",)


def compile_triton(instance: TritonInstance, sm: str) -> Compiled | Failed:
    """Compiles a kernel. It must run in a process of its own, since it changes Triton's global settings.

    Args:
        instance: the kernel.
        sm: architecture.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    knobs.compilation.disable_line_info = True  # line information has paths
    kernel = getattr(importlib.import_module(instance.module), instance.function)
    constants = dict(instance.constants)
    signature = dict(instance.signature) | dict.fromkeys(constants, "constexpr")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, type) in enumerate(instance.signature)
        if type[0] == "*" and name not in instance.unaligned
    }
    options = {**OPTIONS, "num_warps": instance.num_warps, "num_stages": instance.num_stages}
    with tempfile.TemporaryDirectory() as folder:  # Triton's own cache would ignore our settings
        knobs.cache.dir = folder
        try:
            source = ASTSource(kernel, signature, constants, aligned)
            made = triton.compile(source, target=GPUTarget("cuda", _CAPABILITIES[sm], 32), options=options)
            facts, ptx = made.metadata, made.asm["ptx"].encode()
            if sm == PTX:
                code = ptx
            elif sm in _ASSEMBLED_AGAIN:
                code = _assembled(ptx, sm, Path(folder), knobs.nvidia.ptxas.path)
            else:
                code = made.asm["cubin"]
        except (CompilationError, PTXASError) as error:
            return Failed(str(error))
    if facts.num_ctas != 1 or facts.profile_scratch_size:
        return Failed("it needs clusters or memory for a profile, which our launches do not provide")
    return Compiled(
        code,
        facts.name,
        *((0, 0, 0) if sm == PTX else resources(code, facts.name)),
        shared_bytes=facts.shared,
        num_warps=facts.num_warps,
        scratch_bytes=facts.global_scratch_size,
    )


def _assembled(ptx: bytes, sm: str, folder: Path, assembler: str) -> bytes:
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_bytes(ptx)
    subprocess.run([assembler, "--fmad=false", f"--gpu-name={sm}", str(source), "-o", str(cubin)], check=True)
    return cubin.read_bytes()
