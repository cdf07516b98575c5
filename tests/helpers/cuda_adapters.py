"""A matrix product with adapters, launched as a plan for GPUs would, on the emulated GPU or a real one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from enginewright.adapter_plan import KERNEL, LOGIT_ROWS, TOKENS, with_adapters
from enginewright.adapter_sites import RowRun, Site
from enginewright.plan import (
    COMMON_DIMS,
    AdaptersOperand,
    Buffer,
    BufferOperand,
    InputOperand,
    KernelCall,
    Linear,
    Operand,
    Plan,
    WeightOperand,
    step_sizes,
)
from enginewright.plugins.gemm.adapters_cuda import ADAPTER_SOURCES, adapter_launches
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.device.cuda.adapters import DeviceAdapters
from tests.emulator.device import EmulatedDevice, device_for
from tests.helpers.cuda_gemm import DTYPES, Gemm, Problem, buffer_matrix, buffer_rows
from tests.helpers.site_adapters import Adapter

MAX_RANK = 320
MODULES = 2  # layers of the site, so that its A may have this many times MAX_RANK
WEIGHT = "weight"


class AdaptedGemm:
    """A GEMM with slots for adapters.

    Args:
        gemm: the GEMM; its result is fp32.
        adapters: the adapter of each slot.
        rows: rows of its matrices: TOKENS or LOGIT_ROWS.
        max_rank: largest rank of a layer.
    """

    def __init__(
        self, gemm: Gemm, adapters: Sequence[Adapter], rows: Linear = TOKENS, max_rank: int = MAX_RANK
    ) -> None:
        assert gemm.to == "f32"
        self.gemm, self.rows = gemm, rows
        half = gemm.rows // MODULES
        runs = RowRun("first", 0, half), RowRun("second", 0, gemm.rows - half)
        sites = [Site("another", 1, 1, (RowRun("another", 0, 1),)), Site(WEIGHT, gemm.rows, gemm.columns, runs)]
        extended = with_adapters(self._plan(), sites, max_rank, len(adapters))
        launches = [launch for call in extended.calls for launch in call.launches]
        kernels = {launch.kernel: Specialization(_source(launch.kernel), launch.kernel) for launch in launches}
        self.plan, self.device = extended, EmulatedDevice(kernels, 90) if gemm.wgmma else device_for(kernels)
        self.adapters = DeviceAdapters(self.device, extended, sites, len(adapters), max_rank)
        for slot, adapter in enumerate(adapters):
            self.adapters.load(slot, {WEIGHT: adapter.site_adapter(gemm.rows)})

    def _plan(self) -> Plan:
        gemm = self.gemm
        columns = {"x": gemm.columns, "out": gemm.outputs}
        dtypes = {"x": gemm.x_type, "out": "f32"}
        if gemm.x_type != "bf16":
            columns["x_scale"], dtypes["x_scale"] = gemm.groups, "f32"
        buffers = tuple(
            Buffer(dtypes[role], self.rows, count, slot) for slot, (role, count) in enumerate(columns.items())
        )
        operands: dict[str, Operand] = {
            role: BufferOperand(index, 0, count) for index, (role, count) in enumerate(columns.items())
        }
        roles = "weight", *(role for role, there in (("bias", gemm.bias), ("zero", gemm.zeros)) if there)
        operands |= {role: WeightOperand(role) for role in (*roles, *(["scale"] if gemm.format != "bf16" else []))}
        call = KernelCall(f"gemm_{gemm.format}@1", operands, {"group": gemm.group}, gemm.launches)
        return Plan(
            target="cuda",
            dims=COMMON_DIMS,
            inputs=(),
            caches=(),
            buffers=buffers,
            calls=(call,),
            outputs={"logits": 1},
            vocab_size=gemm.outputs,
            max_seq_len=1,
            adapting=adapter_launches([gemm.x_type]),
        )

    def run(self, problem: Problem, slots: Sequence[int], rows: slice = slice(None)) -> torch.Tensor:
        """The result of some rows of a problem, whose adapters are those of `slots`: [rows, outputs]."""
        gemm, own = self.gemm, np.array(slots[rows], np.int32)
        count = len(own)
        logit_rows = np.arange(count, dtype=np.int32)
        tables = self.adapters.tables(own, logit_rows)
        sizes = step_sizes(tokens=count, sequences=1, logit_rows=count)
        out = np.full((count + 1, buffer_matrix("f32", gemm.outputs).stride), -77, np.int32)  # a NaN
        counters, partial = np.zeros(4096, np.int32), np.full(1 << 19, np.nan, np.float32)
        given = {
            "x": buffer_rows(problem.x[rows], 99 if gemm.x_type == "i8" else torch.nan),
            "x_scale": buffer_rows(problem.x_scale[rows], torch.nan),
            "counters": counters,
            "partial": partial,
            "out": out,
            **{role: problem.packed(role) for role in problem.weights},
        }
        addresses = {role: self._uploaded(values) for role, values in given.items()}
        adapted = bool((own >= 0).any())  # otherwise launches are those of a plan without adapters
        stepped = {name: self._uploaded(values) for name, values in tables.items()}
        of_sizes = self._uploaded(np.array(sizes.counts, np.int32))
        for call in self.plan.calls:
            adds = call.kernel == KERNEL
            for role in ("delta", "shrunk"):
                operand = call.operands.get(role)
                if adds and isinstance(operand, BufferOperand):
                    stride = self.plan.buffers[operand.index].stride
                    addresses[role] = self._uploaded(np.full((count, stride), np.nan, np.float32))
            delta = call.operands["delta"]
            assert isinstance(delta, BufferOperand)
            for launch in call.launches:
                if not launch.runs(sizes) or (adds and not adapted):
                    continue
                values = [of_sizes]
                for role in launch.arguments:
                    match call.operands.get(role):
                        case AdaptersOperand() | InputOperand() if not adapted:
                            values.append(0)
                        case AdaptersOperand():
                            values.append(self.adapters.address(delta.index))
                        case InputOperand(name):
                            values.append(stepped[name])
                        case None if role not in ("counters", "partial"):
                            values.append(0)
                        case _:
                            values.append(addresses[role])
                grid = [extent.at(sizes, 3) for extent in launch.grid]
                run = self.device.launcher(launch.kernel, launch.threads, launch.shared_bytes, values)
                run((grid[0], grid[1], grid[2]))
        self.device.synchronize()
        self.device.download(out.reshape(-1).view(np.uint8), addresses["out"])
        self.device.synchronize()
        assert (out[count:] == -77).all() and (out[:, gemm.outputs :] == -77).all(), "written where nothing belongs"
        return torch.from_numpy(out).view(DTYPES["f32"])[:count, : gemm.outputs].double()

    def _uploaded(self, values: np.ndarray) -> int:
        """Address of a copy on the device."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        address = self.device.allocate(data.nbytes)
        self.device.upload(address, data)
        self.device.synchronize()
        return address

    def barriers(self) -> list[str]:
        """Barriers and waits of the emulated kernels that were reached so far, without those of GEMMs."""
        assert isinstance(self.device, EmulatedDevice)
        found = {site for one in self.device._compiled.values() for site in one.sites}
        return sorted(site for site in found if "adapter_delta" in site)

    @contextmanager
    def without(self, site: str) -> Iterator[None]:
        """Makes one barrier or wait do nothing within the context."""
        assert isinstance(self.device, EmulatedDevice)
        libraries = list(self.device._compiled.values())
        for one in libraries:
            one._library.enginewright_disable_site(site.encode())
        yield
        for one in libraries:
            one._library.enginewright_disable_site(b"")


def _source(kernel: str) -> str:
    function = kernel.partition("<")[0]
    return ADAPTER_SOURCES.get(function, f"{function}.cuh")


def expected(problem: Problem, adapters: Sequence[Adapter], slots: Sequence[int]) -> torch.Tensor:
    """The right result, float64 [tokens, outputs]."""
    y, x = problem.product(), problem.inputs()
    for slot, adapter in enumerate(adapters):
        rows = [row for row, own in enumerate(slots) if own == slot]
        y[rows] = adapter.applied(y[rows], x[rows])
    return problem.finished(y)


__all__ = ["LOGIT_ROWS", "TOKENS", "AdaptedGemm", "expected"]
