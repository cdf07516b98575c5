"""What the GPU kernels of a model take: registers, memory that spills, shared memory, and the seconds to compile them.

    python benchmarks/gpu_kernels.py [--model MODEL] [--target TARGETS] [--jobs N] [--each] [QUANT ...]

Needs no GPU. It ends with 1 if a kernel keeps values in memory that its registers should hold, and is not in LOCAL.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from protocol.models import SMOLLM2

from enginewright.builder.assembly import BuildConfig, assemble
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.cuda import Compiled, Instance, compile_kernels
from enginewright.builder.progress import Silent
from enginewright.passes.quant import quant_config
from enginewright.targets import architectures, parse_targets

QUANTS = ("bf16", "int8-wo", "int4-rtn", "fp8")
TARGETS = "cuda:sm_80,sm_90a,sm_100a"
LOCAL = {  # function → why its local memory is right
    "rope_table": "sin and cos reduce large angles with a table, in a branch that positions hardly take",
}

Made = Mapping[str, Mapping[Instance, Compiled]]  # architecture → kernel → its code


def kernels(model: str, quants: list[str], targets: tuple[str, ...]) -> list[Instance]:
    """Of a model in all these formats, each once, by their names."""
    checkpoint, found = open_checkpoint(model), dict[str, Instance]()
    for quant in quants:
        config = BuildConfig(quant=quant_config(quant), targets=targets)
        for name, kernel in assemble(checkpoint, config, Silent()).kernels.items():
            found[name] = Instance(kernel.source, kernel.expression)
    return [found[name] for name in sorted(found)]


def function(kernel: Instance) -> str:
    return kernel.expression.partition("<")[0]


def span(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def cell(compiled: Collection[Compiled]) -> str:
    """Registers of a thread, then local memory of a thread and static shared memory of a block where there is any."""
    parts = [span([one.registers for one in compiled])]
    if any(one.local_bytes for one in compiled):
        parts.append(f"{span([one.local_bytes for one in compiled])} B local")
    if any(one.static_shared_bytes for one in compiled):
        parts.append(f"{span([one.static_shared_bytes for one in compiled])} B shared")
    return ", ".join(parts)


def table(made: Made, *, each: bool = False) -> str:
    """A line for each function, or each of its specializations, and what it takes on each architecture."""
    kernels = next(iter(made.values()))
    groups: dict[str, list[Instance]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.expression if each else function(kernel), []).append(kernel)
    lines = [f"| kernel | specializations | {' | '.join(made)} |", "|---" * (len(made) + 2) + "|"]
    for name, group in groups.items():
        cells = (cell([compiled[kernel] for kernel in group]) for compiled in made.values())
        lines.append(f"| `{name}` | {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spilling(made: Made, allowed: Mapping[str, str] = LOCAL) -> list[str]:
    """Kernels with local memory that is not allowed."""
    return [
        f"{sm}: {compiled.local_bytes} bytes of local memory a thread in {kernel.expression}"
        for sm, compiled_kernels in made.items()
        for kernel, compiled in compiled_kernels.items()
        if compiled.local_bytes and function(kernel) not in allowed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quants", nargs="*", default=QUANTS, metavar="QUANT")
    parser.add_argument("--model", default=str(SMOLLM2))
    parser.add_argument("--target", default=TARGETS)
    parser.add_argument("--jobs", type=int, help="processes that compile; one a core otherwise")
    parser.add_argument("--each", action="store_true", help="a line for each specialization")
    given = parser.parse_args()
    targets = parse_targets([given.target])
    found, sms = kernels(given.model, list(given.quants), targets), architectures(targets)
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            start = time.monotonic()
            made = compile_kernels(found, sms, given.jobs, cache=Path(cache))
            seconds.append(time.monotonic() - start)
    nbytes = {sm: sum(len(compiled.cubin) for compiled in made[sm].values()) for sm in sms}
    print(table(made, each=given.each))
    print(f"\n{len(found)} kernels for {len(sms)} architectures: {seconds[0]:.1f} s, {seconds[1]:.2f} s from the cache")
    print("bytes of code: " + ", ".join(f"{sm} {size / 1e6:.2f} MB" for sm, size in nbytes.items()))
    wrong = spilling(made)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
