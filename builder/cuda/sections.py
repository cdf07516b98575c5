"""The code of an engine: a section for each GPU architecture that it is built for."""

from collections.abc import Iterable, Mapping

from enginewright.builder.cuda.compile import compile_kernels
from enginewright.builder.cuda.kernel import Instance
from enginewright.code import CODE, write_code
from enginewright.plugins.kernel import Specialization
from enginewright.targets import architectures


def code_sections(kernels: Mapping[str, Specialization], targets: Iterable[str]) -> dict[str, bytes]:
    """Kernels by name, compiled for each GPU architecture among the targets, or taken from the cache.

    Raises:
        UsageError: the compiler is not installed.
        EngineError: a kernel does not compile.
    """
    instances = {name: Instance(kernel.source, kernel.expression) for name, kernel in kernels.items()}
    sms = architectures(targets)
    compiled = compile_kernels(instances.values(), sms) if sms else {}
    return {
        f"{CODE}{sm}": write_code({name: (made[one].launch, made[one].cubin) for name, one in instances.items()})
        for sm, made in compiled.items()
    }
