"""Makes the code of an engine: a section for each GPU architecture of the build."""

from collections.abc import Iterable, Mapping

from enginewright.builder.cuda.compile import Kernel, compile_each
from enginewright.builder.cuda.kernel import Instance
from enginewright.code import CODE, write_code
from enginewright.plugins.kernel import Specialization
from enginewright.targets import architectures


def to_compile(kernel: Specialization) -> Kernel:
    """Returns the kernel in the form that its compiler reads."""
    return kernel.triton or Instance(kernel.source, kernel.expression)


def code_sections(kernels: Mapping[str, Specialization], targets: Iterable[str]) -> dict[str, bytes]:
    """Makes the code sections of an engine, compiled or from the cache.

    Args:
        kernels: name → kernel.
        targets: targets of the build; a section is made for each GPU architecture among them.

    Returns:
        Name of the section → its bytes.

    Raises:
        UsageError: the compiler is not installed.
        EngineError: a kernel does not compile.
    """
    wanted = {
        sm: {name: to_compile(kernel) for name, kernel in kernels.items() if sm in (kernel.architectures or (sm,))}
        for sm in architectures(targets)
    }
    made = compile_each([(sm, instance) for sm, instances in wanted.items() for instance in instances.values()])
    archives = {
        sm: {name: (made[sm, one].launch, made[sm, one].cubin) for name, one in instances.items()}
        for sm, instances in wanted.items()
    }
    return {f"{CODE}{sm}": write_code(archive) for sm, archive in archives.items()}
