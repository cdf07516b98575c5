"""Matrix products of an 8B Llama's shapes in every format, compared with cuBLAS and the roofline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch.nn.functional import silu

from benchmarks.gpu.bench import Bench, GpuBench, Replay, Work, copies, interleaved, ratio
from benchmarks.gpu.calls import OpCall, Tensors, buffer, call_of, empty, kernel_of, random_bytes, random_rows
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import Roofline, reported
from enginewright.builder.cuda import Instance
from enginewright.builder.lower.pack import PackedForm
from enginewright.errors import EngineError
from enginewright.plan import Linear, StepSizes, step_sizes
from enginewright.plugins.architectures import ARCHITECTURES
from enginewright.plugins.gemm import gemm_cuda, gemm_format, gemm_tiles
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.kernel import Call, Matrix

TOKENS = (1, 8, 16, 64, 512, 4096)
SAME = 2e-2  # largest difference of bf16 results from torch's, relative to the largest value: both are rounded to bf16
CUBLAS, SCALED_MM = "cublas bf16", "cublas fp8"


@dataclass(frozen=True)
class Shape:
    """features: rows of the weight, gates and ups where `gated`. max_tokens: tokens that it is called with."""

    name: str
    features: int
    columns: int
    gated: bool = False
    max_tokens: int = TOKENS[-1]


SHAPES = (
    Shape("o", 4096, 4096),
    Shape("qkv", 6144, 4096),
    Shape("gate_up", 28672, 4096, gated=True),
    Shape("down", 4096, 14336),
    Shape("head", 128256, 4096, max_tokens=64),  # a row a sequence
)


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights and activations."""

    name: str
    op: str
    weight: str  # dtype of packed weights
    group: int = 0  # columns that share one scale; 0: one scale for each row
    x: str = "bf16"  # dtype of activations
    sibling: str = ""  # for Hopper's wgmma: name of the same format with the kernels of other GPUs

    @property
    def weights(self) -> str:
        """Name of the format whose weights it has."""
        return self.sibling or self.name

    def forms(self, shape: Shape) -> dict[str, PackedForm]:
        pairs = "_pairs" if shape.gated else ""
        forms = {"weight": PackedForm(self.weight, (shape.features, shape.columns), f"r16{pairs}")}
        if self.group:
            groups = (shape.features, groups_of(shape.columns, self.group))
            forms["scale"] = PackedForm("f32" if self.weight == "e4m3" else "bf16", groups, f"r16_columns{pairs}")
        elif self.weight != "bf16":
            forms["scale"] = PackedForm("f32", (shape.features,), "plain")
        return forms

    @property
    def facts(self) -> gemm_format.GemmFormat:
        return gemm_format.FORMATS[self.op.removeprefix("Gemm").lower()]

    @property
    def tiles(self) -> gemm_tiles.Tiles:
        """The tiles that engines have."""
        return gemm_tiles.TILES[self.facts.name]

    def call(self, shape: Shape, sm: str, tiles: gemm_tiles.Tiles | None = None) -> OpCall:
        """tiles: others than those of engines."""
        out = shape.features // 2 if shape.gated else shape.features
        to = "f32" if shape.name == "head" else "bf16"
        operands = {"x": buffer(self.x, shape.columns), "out": buffer(to, out)}
        for role, form in self.forms(shape).items():
            rows, columns = Linear(form.shape[0]), form.shape[-1]
            operands[role] = Matrix(form.dtype, rows, columns, columns, columns, form.layout)
        attributes: dict[str, int | str] = {
            "epilogue": "swiglu" if shape.gated else "none",
            "to": int(ir.DataType.FLOAT if to == "f32" else ir.DataType.BFLOAT16),
        }
        if self.x != "bf16":
            operands["x_scale"] = buffer("f32", groups_of(shape.columns, self.group))
        if self.op not in ("GemmBf16", "GemmW8A16"):
            attributes["group"] = self.group
        tiles = tiles or self.tiles
        kernel = gemm_cuda.tiled(kernel_of(self.op), self.facts, tiles)
        call = call_of(self.op, operands, kernel, sm, **attributes)
        arch = replace(ARCHITECTURES[sm], wgmma_gemm=bool(self.sibling))
        launches = gemm_cuda.launches_on(arch, Call(call.matrices, attributes), self.facts, tiles)
        if not self.sibling:
            return replace(call, launches=tuple(launches))
        wgmma = tuple(launch for launch in launches if launch.kernel.startswith("gemm_wgmma"))
        return replace(call, launches=wgmma, sources={"gemm_wgmma": "gemm_wgmma.cuh"})


FORMATS = (
    WeightFormat("bf16", "GemmBf16", "bf16"),
    WeightFormat("int8", "GemmW8A16", "i8"),
    WeightFormat("fp8", "GemmFp8A16", "e4m3"),
    WeightFormat("w8a8", "GemmW8A8", "i8", x="i8"),
    WeightFormat("fp8a8", "GemmFp8A8", "e4m3", x="e4m3"),
    WeightFormat("fp8a8 blocks", "GemmFp8A8", "e4m3", group=128, x="e4m3"),
    WeightFormat("int4", "GemmW4A16", "u4", group=128),
    WeightFormat("mxfp4", "GemmMxfp4A16", "e2m1", group=32),
)
HOPPER = tuple(replace(format, name=f"{format.name} wgmma", sibling=format.name) for format in FORMATS)


def sizes_of(tokens: int) -> StepSizes:
    return step_sizes(tokens=tokens, sequences=tokens, logit_rows=tokens)


def r16(weight: torch.Tensor, gated: bool) -> torch.Tensor:
    """BF16 [features, columns], multiples of 16 and 64, as it is packed (builder/lower/pack.py): UINT8 [nbytes]."""
    halves = weight.chunk(2) if gated else [weight]
    blocks = [half.view(torch.int32).view(-1, 16, half.shape[1] // 2).transpose(1, 2) for half in halves]
    return torch.stack(blocks, dim=1).contiguous().view(torch.uint8).flatten()


class Weights:
    """Weights of a shape: sets of operands in turn for a format, and plain matrices for torch."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.bench, self.shape = bench, shape
        self.plain = [self._plain() for _ in range(copies(bench, 2 * shape.features * shape.columns, 2))]

    def _plain(self) -> torch.Tensor:
        shape = (self.shape.features, self.shape.columns)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.bench.at).mul_(self.shape.columns**-0.5)

    def packed(self, format: WeightFormat) -> list[Tensors]:
        if format.weights == "bf16":
            return [{"weight": r16(weight, self.shape.gated)} for weight in self.plain]
        forms = format.forms(self.shape)
        count = copies(self.bench, sum(form.nbytes for form in forms.values()), 4)
        at = self.bench.at
        return [{role: random_bytes(form.dtype, form.nbytes, at) for role, form in forms.items()} for _ in range(count)]


def works(bench: Bench, call: OpCall, weights: list[Tensors], x: Tensors, tokens: int) -> tuple[list[Work], Tensors]:
    """A call with each set of weights; and the operands that all have."""
    sizes = sizes_of(tokens)
    out = empty(call.matrices["out"], sizes, bench.at)
    shared = {**x, "out": out, **call.scratch(sizes, bench.at)}
    return [call.bind(bench.device, {**shared, **one}, sizes) for one in weights], shared


def activations(call: OpCall, tokens: int, at: str) -> Tensors:
    operands = {role: call.matrices[role] for role in ("x", "x_scale") if role in call.matrices}
    return {role: random_rows(matrix, sizes_of(tokens), at) for role, matrix in operands.items()}


def error(call: OpCall, shape: Shape, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> float:
    """Largest error of a bf16 call, relative to the largest number."""
    expected = x[:, : shape.columns].float() @ weight.float().T
    if shape.gated:
        gate, up = expected.chunk(2, dim=1)
        expected = silu(gate) * up
    found = out[: len(x), : call.matrices["out"].columns].float()
    return float((found - expected).abs().max() / expected.abs().max())


def of_torch(bench: Bench, shape: Shape, plain: list[torch.Tensor], x: torch.Tensor) -> dict[str, Replay | str]:
    """cuBLAS as torch calls it, without an activation after it, or the reason why it cannot run."""
    found: dict[str, Replay | str] = {}
    y = torch.empty(len(x), shape.features, dtype=torch.bfloat16, device=bench.at)
    found[CUBLAS] = bench.torch([lambda w=w: torch.mm(x, w.T, out=y) for w in plain])
    try:
        one = torch.ones((), device=bench.at)
        x8, w8 = x.to(torch.float8_e4m3fn), [w.to(torch.float8_e4m3fn) for w in plain]
        w8 += [w.to(torch.float8_e4m3fn) for w in plain]  # half the bytes
        fp8 = [lambda w=w: torch._scaled_mm(x8, w.T, one, one, out_dtype=torch.bfloat16) for w in w8]
        found[SCALED_MM] = bench.torch(fp8)
    except (RuntimeError, ValueError) as problem:
        found[SCALED_MM] = str(problem)
    return found


def measure(bench: Bench, report: Report, roofline: Roofline, shape: Shape, calls: dict[WeightFormat, OpCall]) -> None:
    weights = Weights(bench, shape)
    packed = {name: weights.packed(format) for name, format in {format.weights: format for format in calls}.items()}
    first: dict[str, torch.Tensor] = {}  # token 0 of each format, from the fewest tokens
    for tokens in (tokens for tokens in TOKENS if tokens <= shape.max_tokens):
        contestants: dict[str, Replay] = {}
        errors: dict[str, float] = {}
        outs: dict[str, torch.Tensor] = {}
        torch.manual_seed(tokens)
        x = torch.randn(shape.max_tokens, shape.columns, dtype=torch.bfloat16, device=bench.at)[:tokens]
        for name, made in of_torch(bench, shape, weights.plain, x).items():
            if isinstance(made, str):
                report.skip(f"gemm/{shape.name}/{tokens}/{name}", made)
            else:
                contestants[name] = made
        for format, call in calls.items():
            torch.manual_seed(0)
            operands = activations(call, shape.max_tokens, bench.at)
            if not call.instances(sizes_of(tokens)):
                continue
            mine, shared = works(bench, call, packed[format.weights], operands, tokens)
            mine[0]()
            bench.device.synchronize()
            outs[format.name] = shared["out"][:tokens, : call.matrices["out"].columns].float()
            # All tokens, where another kernel has them too; else the first one.
            found = outs[format.name] if format.sibling in outs else outs[format.name][0]
            reference = outs.get(format.sibling)
            if reference is None:
                reference = first.setdefault(format.weights, found.clone())
            errors[format.name] = float((found - reference).abs().max() / reference.abs().max())
            if format.name == "bf16":
                errors["bf16"] = error(call, shape, operands["x"][:tokens], weights.plain[0], shared["out"])
            contestants[format.name] = bench.ours(mine)
        seconds = interleaved(bench, contestants)
        for name, found in seconds.items():
            form = next((format for format in calls if format.name == name), None)
            nbytes = bytes_of(shape, form, tokens)
            typical, flops = sorted(found)[len(found) // 2], 2 * tokens * shape.features * shape.columns
            values: dict[str, float | str] = {
                "seconds": typical,
                "over cublas": ratio(seconds[CUBLAS], found),
                "of the memory roofline": nbytes / typical / roofline.memory,
                "of the matmul roofline": flops / typical / roofline.bf16_flops,
            }
            if SCALED_MM in seconds:
                values["over cublas fp8"] = ratio(seconds[SCALED_MM], found)
            if form is not None and form.sibling in seconds:
                values["over mma.sync"] = ratio(seconds[form.sibling], found)
            if name in errors and not errors[name] < SAME:
                values["error"] = f"it is off by {errors[name]:.2g} of the largest number"
            report.add(f"gemm/{shape.name}/{tokens}/{name}", **values)


def bytes_of(shape: Shape, format: WeightFormat | None, tokens: int) -> int:
    """That a product has to read and write. format: None is torch's."""
    weight = 2 * shape.features * shape.columns
    if format is not None:
        weight = sum(form.nbytes for form in format.forms(shape).values())
    out = shape.features // 2 if shape.gated else shape.features
    return weight + 2 * tokens * (shape.columns + out)


def prepared(
    bench: Bench, report: Report, formats: Sequence[WeightFormat]
) -> Iterator[tuple[Shape, dict[WeightFormat, OpCall]]]:
    """Calls whose kernels compile, a shape; all of them are compiled at once if they do."""
    calls = {(shape, format): format.call(shape, bench.sm) for shape in SHAPES for format in formats}
    kernels = {place: kernels_of(place[0], call) for place, call in calls.items()}
    try:
        bench.compile(kernel for some in kernels.values() for kernel in some)
    except EngineError:
        for (shape, format), some in kernels.items():
            try:
                bench.compile(some)
            except EngineError as problem:
                report.add(f"gemm/{shape.name}/{format.name}", error=str(problem)[:300])
                del calls[shape, format]
    for shape in SHAPES:
        yield shape, {format: calls[shape, format] for format in formats if (shape, format) in calls}


def kernels_of(shape: Shape, call: OpCall) -> list[Instance]:
    return [kernel for tokens in TOKENS if tokens <= shape.max_tokens for kernel in call.instances(sizes_of(tokens))]


def run(report: Report) -> None:
    bench = GpuBench()
    roofline = reported(bench, report)
    formats = (*FORMATS, *HOPPER) if bench.sm == "sm_90a" else FORMATS
    for shape, calls in prepared(bench, report, formats):
        with report.case(f"gemm/{shape.name}"):
            measure(bench, report, roofline, shape, calls)
        torch.cuda.empty_cache()
