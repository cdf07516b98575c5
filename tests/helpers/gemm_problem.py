"""Operands of a GEMM kernel, its result, and the expected result in float64."""

import torch

from tests.helpers.kernel_runner import Buffer, KernelRunner, Operands, weight

TOKENS = [1, 2, 3, 4, 5, 6, 7, 16, 17, 33, 61]
DTYPES = {
    "gemm_bf16@1": torch.bfloat16,
    "gemm_w8a16@1": torch.int8,
    "gemm_fp8a16@1": torch.float8_e4m3fn,
    "gemm_w8a8@1": torch.int8,
    "gemm_w4a8@1": torch.uint8,
    "gemm_mxfp4a8@1": torch.uint8,
}
KERNELS = list(DTYPES)
BF16_KERNELS, INT8_KERNELS, FOUR_BIT_KERNELS = KERNELS[:3], KERNELS[3:], KERNELS[4:]
E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float64)  # doubled


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed))


def random_weight(kernel: str, rows: int, columns: int) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=generator(rows, columns))
    if DTYPES[kernel] == torch.int8:
        values = (values * 40).clamp(-127, 127)
    if DTYPES[kernel] == torch.uint8:
        values = (values * 4 + 8).clamp(0, 15)
    return values.to(DTYPES[kernel])


def runs_of(x: torch.Tensor, group: int) -> torch.Tensor:
    """Splits columns into groups, [rows, groups, group], with zeros after the last column; group 0 is all columns."""
    group = group or x.shape[1]
    return torch.nn.functional.pad(x, (0, -x.shape[1] % group)).view(len(x), -1, group)


def scales_of(x: torch.Tensor, group: int) -> torch.Tensor:
    """A scale for each quantization group of a token, [tokens, groups], which depends on that group alone."""
    return (runs_of(x, group).double().abs().sum(dim=2) % 3.7 * 0.01 + 0.01).float()


class Problem:
    """Operands x [tokens, columns] and weight [rows, columns] of a GEMM, and the expected result.

    group: columns of a quantization group where x is int8, or weights are FP8 with a scale for each group; None is 32
    for weights of 4 bits and 0, all columns, for others. zeros: whether weights of 4 bits have zero points.
    """

    def __init__(
        self,
        kernel: str,
        tokens: int,
        rows: int,
        columns: int,
        epilogue: str = "none",
        *,
        bias: bool = False,
        group: int | None = None,
        zeros: bool = False,
    ):
        self.kernel, self.epilogue, self.rows = kernel, epilogue, rows
        self.group = (32 if kernel in FOUR_BIT_KERNELS else 0) if group is None else group
        self.outputs = rows if epilogue == "none" else rows // 2
        self.x = torch.randn(tokens, columns, generator=generator(tokens, columns)).bfloat16()
        if kernel in INT8_KERNELS:
            self.x = (self.x.float() * 40).clamp(-127, 127).to(torch.int8)
        self.weight = random_weight(kernel, rows, columns)
        self.vectors: dict[str, torch.Tensor] = {}
        self.of_groups: dict[str, torch.Tensor] = {}
        groups = runs_of(self.x[:1], self.group).shape[1]
        if kernel in FOUR_BIT_KERNELS:
            scale = torch.randn(rows, groups, generator=generator(rows, groups)) * 0.02
            self.of_groups["scale"] = scale.bfloat16()
            if zeros:
                self.of_groups["zero"] = (torch.arange(rows * groups).view(rows, groups) % 16).to(torch.int8)
        elif kernel == "gemm_fp8a16@1" and self.group:
            self.of_groups["scale"] = torch.rand(rows, groups, generator=generator(rows, groups)) * 0.02 + 0.01
        elif self.weight.itemsize == 1:
            self.vectors["scale"] = torch.rand(rows, generator=generator(rows)) * 0.02 + 0.01
        if bias:
            self.vectors["bias"] = torch.randn(rows, generator=generator(rows, 1)) * 3

    def run(self, isa: str, dtype: str, threads: int = 1, x: torch.Tensor | None = None) -> torch.Tensor:
        """The kernel's result, float32; fails if pad columns of a bf16 result are not zero."""
        runner, out = self._call(isa, dtype, threads, self.x if x is None else x)
        if dtype == "bf16":
            assert not runner.read_pad(out).any()
        else:
            assert runner.read_pad(out).isnan().all(), "written after the columns of an f32 result"
        return runner.read(out)

    def work(self, isa: str) -> dict[str, int]:
        return self._call(isa, "f32", 1, self.x)[0].work()

    def _call(self, isa: str, dtype: str, threads: int, x: torch.Tensor) -> tuple[KernelRunner, Buffer]:
        runner = KernelRunner(isa, threads, tokens=len(x))
        out = runner.buffer(len(x), self.outputs, dtype)
        operands, attributes = self.call_of(runner, x)
        runner.call(self.kernel, {**operands, "out": out}, attributes)
        return runner, out

    def call_of(self, runner: KernelRunner, x: torch.Tensor) -> tuple[Operands, dict[str, int | float | str]]:
        """Operands of a call but `out`, and its attributes."""
        operands: Operands = {
            "x": runner.filled(x),
            "weight": weight(self.weight, "r16" if self.epilogue == "none" else "r16_pairs", self._packed),
        }
        operands |= {name: weight(vector) for name, vector in self.vectors.items()}
        layout = "r16_columns" if self.epilogue == "none" else "r16_columns_pairs"
        operands |= {name: weight(values, layout) for name, values in self.of_groups.items()}
        attributes: dict[str, int | float | str] = {"epilogue": self.epilogue}
        if x.dtype == torch.int8:
            operands["x_scale"] = runner.filled(scales_of(x, self.group))
        if x.dtype == torch.int8 or self.weight.dtype == torch.float8_e4m3fn:
            attributes["group"] = self.group
        return operands, attributes

    def expected(self) -> torch.Tensor:
        """The right result, float64."""
        return self.finished(self.product())

    def inputs(self) -> torch.Tensor:
        """x in float64, with its scales."""
        x = self.x.double()
        return self._scaled(x, scales_of(self.x, self.group)) if self.x.dtype == torch.int8 else x

    def product(self) -> torch.Tensor:
        """The scaled product in float64, without the bias."""
        x, matrix = self.inputs(), self.weight.double()
        if self.of_groups:
            matrix = self._scaled(self.numbers(), self.of_groups["scale"])
        y = x @ matrix.T
        if "scale" in self.vectors:
            y = y * self.vectors["scale"].double()
        return y

    def finished(self, y: torch.Tensor) -> torch.Tensor:
        """Adds the bias to a product in float64, and applies the epilogue."""
        if "bias" in self.vectors:
            y = y + self.vectors["bias"].double()
        if self.epilogue == "none":
            return y
        gate, up = y.chunk(2, dim=1)
        if self.epilogue == "swiglu":
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def numbers(self) -> torch.Tensor:
        """The weights before their groups' scales are applied, in float64."""
        if self.weight.dtype == torch.float8_e4m3fn:
            return self.weight.double()
        if self._packed:
            return E2M1[self.weight.int()]
        zeros = self.of_groups.get("zero", torch.full_like(self.of_groups["scale"], 8))
        codes = self.weight.double()
        return codes - self._scaled(torch.ones_like(codes), zeros)

    @property
    def _packed(self) -> str | None:
        return "e2m1" if self.kernel == "gemm_mxfp4a8@1" else None

    def _scaled(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Multiplies each group by its factor."""
        return (runs_of(values, self.group) * factors.double().unsqueeze(2)).flatten(1)[:, : values.shape[1]]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error over the largest value expected; NaN if there is one in the result."""
    return float((result.double() - expected).abs().max() / expected.abs().max())
