"""Resources of the GPU kernels of a model: registers, spilled bytes, shared memory, and the seconds to compile them.

    python benchmarks/kernel_resources.py [--model MODEL] [--target TARGETS] [--batch-invariant] [--jobs N] [--each]
        [QUANT ...]

Needs no GPU. It ends with 1 if a kernel keeps values in memory that its registers should hold, and is not in LOCAL, or
takes more shared memory than every GPU has.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.models import SMOLLM2

from enginewright.builder.assembly import BuildConfig, assemble
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.cuda import Compiled, Instance, TritonInstance, compile_each
from enginewright.builder.cuda.sections import to_compile
from enginewright.builder.progress import Silent
from enginewright.passes.quant import quant_config
from enginewright.plan import MAX_SHARED_BYTES
from enginewright.targets import CUDA, architectures, parse_targets

QUANTS = ("bf16", "int8-wo", "int4-rtn", "fp8")
TARGETS = "cuda:sm_80,sm_90a,sm_100a"
LOCAL = {  # function → why its local memory is right
    "rope_table": "sin and cos reduce large angles with a table, in a branch that positions hardly take",
}
SHARED_BYTES = 99 << 10  # of a block, on GPUs of capability 8.6, 8.9 and 12.0; code for 8.0 runs on two of them, too
HOPPER = ("sm_90a",)  # kernels for it alone may take all that it has


@dataclass(frozen=True)
class Kernel:
    """One specialization of a kernel, and the most that its launches take."""

    instance: Instance | TritonInstance
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory
    architectures: tuple[str, ...] = ()  # that it is for; () is all

    @property
    def function(self) -> str:
        return self.instance.expression.partition("<")[0]


Made = Mapping[str, Mapping[Instance | TritonInstance, Compiled]]  # architecture → kernel → its code


def kernels(model: str, quants: Sequence[str], targets: tuple[str, ...], batch_invariant: bool = False) -> list[Kernel]:
    """Kernels of a model in all these formats, each once, by their names."""
    checkpoint, found = open_checkpoint(model), dict[str, Kernel]()
    for quant in quants:
        config = BuildConfig(quant=quant_config(quant), targets=targets, batch_invariant=batch_invariant)
        assembly = assemble(checkpoint, config, Silent())
        for launch in assembly.plans[CUDA].launches():
            code, before = assembly.kernels[launch.kernel], found.get(launch.kernel)
            found[launch.kernel] = Kernel(
                to_compile(code),
                max(launch.threads, before.threads if before else 0),
                max(launch.shared_bytes, before.shared_bytes if before else 0),
                code.architectures,
            )
    return [found[name] for name in sorted(found)]


def span(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def cell(compiled: Collection[Compiled]) -> str:
    """Registers of a thread, then local memory of a thread and static shared memory of a block where there is any."""
    if not compiled:
        return ""
    parts = [span([one.registers for one in compiled])]
    if any(one.local_bytes for one in compiled):
        parts.append(f"{span([one.local_bytes for one in compiled])} B local")
    if any(one.static_shared_bytes for one in compiled):
        parts.append(f"{span([one.static_shared_bytes for one in compiled])} B static")
    return ", ".join(parts)


def table(found: Sequence[Kernel], made: Made, *, each: bool = False) -> str:
    """A line for each function, or each of its specializations: what it takes, and on each architecture."""
    groups: dict[str, list[Kernel]] = {}
    for kernel in found:
        groups.setdefault(kernel.instance.expression if each else kernel.function, []).append(kernel)
    lines = [
        f"| kernel | specializations | threads | shared bytes | {' | '.join(made)} |",
        "|---" * (len(made) + 4) + "|",
    ]
    for name, group in groups.items():
        cells = (
            cell([compiled[kernel.instance] for kernel in group if kernel.instance in compiled])
            for compiled in made.values()
        )
        launched = f"{span([kernel.threads for kernel in group])} | {span([kernel.shared_bytes for kernel in group])}"
        lines.append(f"| `{name}` | {len(group)} | {launched} | {' | '.join(cells)} |")
    return "\n".join(lines)


def excesses(found: Sequence[Kernel], made: Made, local: Mapping[str, str] = LOCAL) -> list[str]:
    """Describes every kernel that uses too much memory."""
    wrong = []
    for sm, compiled in made.items():
        for kernel in found:
            if kernel.instance not in compiled:
                continue
            code = compiled[kernel.instance]
            if code.local_bytes and kernel.function not in local:
                wrong.append(f"{sm}: {code.local_bytes} bytes of local memory a thread: {kernel.instance.expression}")
            shared_bytes = kernel.shared_bytes + code.shared_bytes + code.static_shared_bytes
            if shared_bytes > (MAX_SHARED_BYTES if (kernel.architectures or tuple(made)) == HOPPER else SHARED_BYTES):
                wrong.append(f"{sm}: {shared_bytes} bytes of shared memory: {kernel.instance.expression}")
    return wrong


def compiled_for(
    found: Sequence[Kernel], sms: Sequence[str], jobs: int | None = None, cache: Path | None = None
) -> Made:
    wanted = {sm: [kernel.instance for kernel in found if sm in (kernel.architectures or sms)] for sm in sms}
    made = compile_each([(sm, one) for sm, some in wanted.items() for one in some], jobs, cache=cache)
    return {sm: {one: made[sm, one] for one in some} for sm, some in wanted.items()}


def children_seconds() -> float:
    """Seconds of processor time of child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quants", nargs="*", default=QUANTS, metavar="QUANT")
    parser.add_argument("--model", default=str(SMOLLM2))
    parser.add_argument("--target", default=TARGETS)
    parser.add_argument("--batch-invariant", action="store_true", help="those of engines that are built so")
    parser.add_argument("--jobs", type=int, help="processes that compile; one a core otherwise")
    parser.add_argument("--each", action="store_true", help="a line for each specialization")
    given = parser.parse_args()
    targets = parse_targets([given.target])
    found, sms = kernels(given.model, given.quants, targets, given.batch_invariant), architectures(targets)
    seconds, before = list[float](), children_seconds()
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            start = time.monotonic()
            made = compiled_for(found, sms, given.jobs, Path(cache))
            seconds.append(time.monotonic() - start)
    print(table(found, made, each=given.each))
    took = f"{seconds[0]:.1f} s ({children_seconds() - before:.1f} s of processors), {seconds[1]:.2f} s from the cache"
    print(f"\n{len(found)} kernels for {len(sms)} architectures: {took}")
    sizes = {sm: sum(len(compiled.cubin) for compiled in made[sm].values()) for sm in sms}
    print("code: " + ", ".join(f"{sm} {size / 1e6:.2f} MB" for sm, size in sizes.items()))
    wrong = excesses(found, made)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
