"""GEMMs as GPUs launch them, in emulation: weights from the bytes of an engine file, poison around everything else."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from enginewright.builder.lower.pack import PackedForm, pack
from enginewright.plan import Buffer, Launch, Linear, linear, step_sizes
from enginewright.plugins.architectures import ARCHITECTURES, ArchSpec
from enginewright.plugins.gemm.gemm_cuda import launches_on
from enginewright.plugins.gemm.gemm_format import FORMATS
from enginewright.plugins.gemm.gemm_tiles import TILES
from enginewright.plugins.kernel import Call, Matrix
from tests.emulator.kernels import SANITIZE, Argument, EmulationError, Kernels
from tests.tolerances import GEMM_BF16_OUT, GEMM_E4M3, GEMM_F32

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i8": torch.int8, "e4m3": torch.float8_e4m3fn}
WEIGHTS = {
    "bf16": "bf16",
    "w8a16": "i8",
    "fp8a16": "e4m3",
    "w4a16": "u4",
    "mxfp4a16": "e2m1",
    "w8a8": "i8",
    "fp8a8": "e4m3",
}
X_TYPES = {"w8a8": "i8", "fp8a8": "e4m3"}  # of x, where it is not bf16
MAX_TOKENS = 1100
E2M1_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float64)


@dataclass(frozen=True)
class Gemm:
    """A call: out [tokens, rows or rows / 2] of x [tokens, columns]. large: in the tiles of the largest launches.
    wgmma: by Hopper's kernel, where tokens are many. batch_invariant: many are added as few are.
    """

    format: str
    rows: int
    columns: int
    epilogue: str = "none"
    bias: bool = False
    group: int = 0
    zeros: bool = False
    to: str = "f32"
    large: bool = False
    wgmma: bool = False
    batch_invariant: bool = False
    arch: ArchSpec = ARCHITECTURES["sm_90a"]  # whose launches it has

    @property
    def outputs(self) -> int:
        return self.rows if self.epilogue == "none" else self.rows // 2

    @property
    def x_type(self) -> str:
        return X_TYPES.get(self.format, "bf16")

    @property
    def weight_groups(self) -> bool:
        return self.group != 0 and self.format != "w8a8"

    @property
    def groups(self) -> int:
        return -(-self.columns // (self.group or self.columns))

    @property
    def tolerance(self) -> float:
        if self.format == "fp8a8" and self.wgmma:
            return GEMM_E4M3 + (GEMM_BF16_OUT if self.to == "bf16" else 0)
        return GEMM_F32 if self.to == "f32" else GEMM_BF16_OUT

    @property
    def launches(self) -> tuple[Launch, ...]:
        out = buffer_matrix(self.to, self.outputs)
        operands = {"x": buffer_matrix(self.x_type, self.columns), "out": out}
        operands["weight"] = Matrix(WEIGHTS[self.format], Linear(self.rows), self.columns, 0, 0, "r16")
        if self.x_type != "bf16":
            operands["x_scale"] = buffer_matrix("f32", self.groups)
        roles = {"bias": self.bias, "zero": self.zeros, "scale": self.format != "bf16"}
        operands |= {role: Matrix("", Linear(), 0, 0, 0) for role, there in roles.items() if there}
        call = Call(
            operands,
            {"epilogue": self.epilogue, "group": self.group},
            batch_invariant=self.batch_invariant,
        )
        launches = launches_on(
            replace(self.arch, wgmma_gemm=self.wgmma), call, FORMATS[self.format], TILES[self.format]
        )
        if self.wgmma:
            return tuple(launch for launch in launches if launch.kernel.startswith("gemm_wgmma"))
        return tuple(launches)

    def launch(self, tokens: int) -> Launch:
        (launch,) = (one for one in self.launches if one.low <= (2**30 if self.large else tokens) <= one.high)
        return launch


@dataclass
class Problem:
    """Numbers for a call, and the expected result in float64."""

    gemm: Gemm
    tokens: int
    seed: int = 0
    x: torch.Tensor = field(init=False)
    weights: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        gemm, generator = self.gemm, torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        shape, of_groups = (gemm.rows, gemm.columns), (gemm.rows, gemm.groups)
        self.weights = {}
        match WEIGHTS[gemm.format]:
            case "bf16":
                self.weights["weight"] = normal(*shape).bfloat16()
            case "i8":
                self.weights["weight"] = integers(-127, 128, *shape).to(torch.int8)
            case "e4m3":  # every code but the NaNs, subnormals too
                codes = integers(0, 127, *shape) + 128 * integers(0, 2, *shape)
                self.weights["weight"] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
            case _:
                self.weights["weight"] = integers(0, 16, *shape).to(torch.uint8)
                scale = normal(*of_groups) if gemm.format == "w4a16" else 2.0 ** integers(-9, -2, *of_groups).float()
                self.weights["scale"] = scale.bfloat16()
        if gemm.zeros:
            self.weights["zero"] = integers(0, 16, *of_groups).to(torch.int8)
        if gemm.format in ("w8a16", "fp8a16", "w8a8", "fp8a8"):
            of_rows = of_groups if gemm.weight_groups else (gemm.rows,)
            self.weights["scale"] = torch.rand(of_rows, generator=generator) * 0.02 + 0.001
        if gemm.bias:
            self.weights["bias"] = normal(gemm.rows) * 3
        x, x_scale = normal(MAX_TOKENS, gemm.columns), torch.rand(MAX_TOKENS, gemm.groups, generator=generator)
        self.x = x[: self.tokens].bfloat16()  # a token is the same in any batch
        self.x_scale = x_scale[: self.tokens] * 0.1 + 0.01
        if gemm.x_type == "i8":
            self.x = (self.x.float() * 40).round().clamp(-127, 127).to(torch.int8)
        if gemm.x_type == "e4m3":
            self.x = (self.x.float() * 120).clamp(-448, 448).to(torch.float8_e4m3fn)

    def inputs(self) -> torch.Tensor:
        """x as it is multiplied, float64 [tokens, columns]."""
        x = self.x.double()
        return x if self.gemm.x_type == "bf16" else x * self._spread(self.x_scale)

    def product(self) -> torch.Tensor:
        """The product with its scales, float64 [tokens, rows]."""
        gemm, weight, of_rows = self.gemm, self.weights["weight"], torch.ones(self.gemm.rows)
        numbers = weight.double()
        if gemm.format == "w4a16":
            numbers -= self._spread(self.weights.get("zero", torch.full((gemm.rows, gemm.groups), 8)))
        if gemm.format == "mxfp4a16":
            numbers = E2M1_DOUBLED[weight.int()]
        if gemm.weight_groups:
            numbers *= self._spread(self.weights["scale"])
        else:
            of_rows = self.weights.get("scale", of_rows)
        return self.inputs() @ numbers.T * of_rows.double()

    def finished(self, y: torch.Tensor) -> torch.Tensor:
        """The result of the bias and the epilogue, float64 [tokens, outputs]."""
        y = y + self.weights.get("bias", torch.zeros(self.gemm.rows)).double()
        if self.gemm.epilogue == "none":
            return y
        gate, up = y.chunk(2, dim=1)
        if self.gemm.epilogue == "swiglu":
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def expected(self) -> torch.Tensor:
        """The right result, float64 [tokens, outputs]."""
        return self.finished(self.product())

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        group = self.gemm.group or self.gemm.columns
        return of_groups.double().repeat_interleave(group, dim=1)[:, : self.gemm.columns]

    def run(self, kernels: Kernels, schedule: str = "forward", seed: int = 0) -> torch.Tensor:
        """Runs the kernel; fails if it wrote outside its result or left counters that are not zero.

        Returns:
            The result, [tokens, outputs].
        """
        gemm, tokens, launch = self.gemm, self.tokens, self.gemm.launch(self.tokens)
        out_buffer = buffer_matrix(gemm.to, gemm.outputs)
        poison = torch.full((tokens + 1, out_buffer.stride), torch.nan, dtype=DTYPES[gemm.to])
        out = poison.view(torch.int32 if gemm.to == "f32" else torch.int16).numpy()
        out[:] = -77  # a NaN
        counters = np.zeros(launch.grid[0].at(step_sizes(tokens=tokens, sequences=0, logit_rows=0), 1), np.int32)
        arguments: dict[str, Argument] = {
            "x": buffer_rows(self.x, 99 if gemm.x_type == "i8" else torch.nan),
            "out": out,
            "counters": counters,
            **{role: self.packed(role) for role in self.weights},
        }
        if gemm.x_type != "bf16":
            arguments["x_scale"] = buffer_rows(self.x_scale, torch.nan)
        splits, blocks = launch.grid[1].rows.constant, launch.grid[0].rows.constant
        if splits > 1 and "partial" in launch.arguments:
            rows = -(-tokens // 8) * 8  # at least; tokens of all tiles are the stride of a split
            rows = next(count for count in (8, 16, 32, 64) if count >= rows)
            width = TILES[gemm.format].feature_warps * 32 * blocks
            arguments["partial"] = np.full((splits, rows, width), np.nan, np.float32)
        kernels.launch(
            launch.kernel,
            [extent.at(step_sizes(tokens=tokens, sequences=0, logit_rows=0), 1) for extent in launch.grid],
            launch.threads,
            launch.shared_bytes,
            np.array([tokens, 0, 0, 0, 0], np.int32),
            *(arguments.get(role) for role in launch.arguments),
            schedule=schedule,
            seed=seed,
        )
        assert not counters.any()
        padded = gemm.outputs if gemm.to == "f32" else out_buffer.padded
        assert (out[tokens:] == -77).all() and (out[:, padded:] == -77).all(), "written where nothing belongs"
        result = torch.from_numpy(out).view(DTYPES[gemm.to])[:tokens].double()
        assert not result[:, gemm.outputs : padded].any(), "padding is zeros"
        return result[:, : gemm.outputs]

    def packed(self, role: str) -> np.ndarray:
        weight = self.weights[role]
        layout = "plain" if weight.dim() == 1 else "r16_columns" if role in ("scale", "zero") else "r16"
        if self.gemm.epilogue != "none" and layout != "plain":
            layout += "_pairs"
        dtype = next(name for name, dtype in DTYPES.items() if dtype == weight.dtype) if role != "weight" else ""
        form = PackedForm(dtype or WEIGHTS[self.gemm.format], tuple(weight.shape), layout)
        poison = b"" if SANITIZE else b"\xff" * 256  # a sanitizer sees where the bytes end, others see a NaN
        return np.frombuffer(b"".join(pack(weight, form)) + poison, np.uint8).copy()


def buffer_matrix(dtype: str, columns: int) -> Matrix:
    stride = Buffer(dtype, linear(tokens=1), columns, 0).stride
    return Matrix(dtype, linear(tokens=1), columns, stride, -(-columns // 64) * 64)


def buffer_rows(values: torch.Tensor, poison: float) -> np.ndarray:
    """Rows in the layout of a buffer: after the columns zeros up to `padded`, then poison."""
    matrix = buffer_matrix("f32", values.shape[1])
    rows = torch.full((len(values), matrix.stride), poison).to(values.dtype)
    rows[:, : matrix.padded] = 0
    rows[:, : values.shape[1]] = values
    bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return rows.view(bits.get(rows.dtype, rows.dtype)).numpy()


def compiled(gemms: Sequence[tuple[Gemm, int]], sm: int = 80) -> Kernels:
    """Compiles the kernels of GEMMs, each with its number of tokens."""
    names = dict.fromkeys(gemm.launch(tokens).kernel for gemm, tokens in gemms)
    return Kernels([(f"{name.partition('<')[0]}.cuh", name) for name in names], sm)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest value expected; NaN if there is one in the result."""
    return float((result - expected).abs().max() / expected.abs().max())


def assert_each_site_is_missed(kernels: Kernels, problems: Sequence[Problem], seeds: int) -> None:
    """Checks that each barrier, fence and wait is needed: without it, one of the problems has another result or an
    error in one of the orders of warps (forward, reverse, or random by one of `seeds` seeds).
    """
    whole = [problem.run(kernels) for problem in problems]
    runs = [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(seeds))]

    def missed(problem: Problem, result: torch.Tensor, run: tuple[str, int]) -> bool:
        try:
            return not torch.equal(problem.run(kernels, *run), result)
        except EmulationError:
            return True

    for site in kernels.sites:
        with kernels.without(site):
            assert any(
                missed(problem, result, run) for problem, result in zip(problems, whole, strict=True) for run in runs
            ), f"nothing is missed without {site}"


def name_of(gemm: Gemm, tokens: int) -> str:
    return f"{gemm.format}-{gemm.rows}x{gemm.columns}-{gemm.epilogue}-{gemm.group}-{tokens}"
