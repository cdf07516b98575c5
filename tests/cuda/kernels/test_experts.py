"""The kernels of experts on CUDA, in emulation: routing as numpy has it, products of each expert's rows in float64."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import msgspec
import numpy as np
import pytest
import torch

from enginewright.builder.cuda import Instance
from enginewright.builder.lower.pack import PackedForm, pack
from enginewright.plan import Launch, Linear, linear, step_sizes
from enginewright.plugins.architectures import ARCHITECTURES
from enginewright.plugins.gemm.gemm_cuda import launches_on
from enginewright.plugins.gemm.gemm_format import FORMATS
from enginewright.plugins.gemm.gemm_tiles import TILES
from enginewright.plugins.kernel import Call, Matrix
from tests.emulator.kernels import SCHEDULES, EmulationError, Kernels
from tests.helpers.compiled import compile_kernels
from tests.helpers.cuda_call import CudaCall, Operand, as_bf16, empty, kernel_of, run, strided, vector
from tests.helpers.cuda_gemm import DTYPES, WEIGHTS, Gemm, Problem, buffer_matrix, buffer_rows, error
from tests.helpers.plugin_cases import ROUTING
from tests.plugins.test_plugins_values import route
from tests.tolerances import GEMM_F32, TANH_GELU_SILU

TOKENS = linear(tokens=1)
GROUPED = {**ROUTING, "scores": "sigmoid", "groups": 4, "chosen_groups": 2, "scale": 2.5}


@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        (ROUTING, []),
        ({**ROUTING, "normalized": 0, "top": 1}, ["bias"]),
        ({**ROUTING, "top": 36}, ["bias", "correction"]),
        (GROUPED, ["correction"]),
    ],
)
def test_routing_is_numpys(attributes: dict[str, int | float | str], names: Sequence[str]) -> None:
    random, experts, columns, top = np.random.default_rng(0), 36, 130, int(attributes["top"])
    x = random.standard_normal((9, columns)).astype(np.float32)
    router = torch.from_numpy(random.standard_normal((experts, columns)) / 8).bfloat16()
    vectors = {name: random.standard_normal(experts).astype(np.float32) for name in names}
    packed = np.frombuffer(b"".join(pack(router, PackedForm("bf16", (experts, columns), "r16_columns"))), np.uint8)
    weight = Operand(packed.copy(), Matrix("bf16", Linear(experts), columns, columns, columns, "r16_columns"))

    def operands(tokens: int) -> dict[str, Operand]:
        return {
            "x": strided("f32", TOKENS, x[:tokens], 192),
            "weight": weight,
            **{name: vector("f32", values) for name, values in vectors.items()},
            "places": empty("i32", TOKENS, tokens, top, 64),
            "share": empty("f32", TOKENS, tokens, top, 64),
            "starts": empty("i32", Linear(1), 1, experts + 1, 64),
            "scores": empty("f32", TOKENS, tokens, 48, 64),
        }

    call = CudaCall(kernel_of("Route"), {name: one.matrix for name, one in operands(9).items()}, **attributes)
    for tokens in (9, 4, 1):
        given = {"x": x[:tokens].astype(np.float64), "weight": router.double().numpy()}
        expected = route({**given, **{k: v.astype(np.float64) for k, v in vectors.items()}}, attributes)  # type: ignore[arg-type]
        for schedule in SCHEDULES:
            found = operands(tokens)
            call.run(found, step_sizes(tokens=tokens, sequences=1, logit_rows=1), schedule)
            np.testing.assert_array_equal(found["places"].values[:tokens, :top], expected[0])
            assert np.abs(found["share"].values[:tokens, :top] / expected[1] - 1).max() < TANH_GELU_SILU
            np.testing.assert_array_equal(found["starts"].values[:1, : experts + 1], expected[2])
            assert (found["places"].values[tokens:] == -1).all() and (found["places"].values[:, top:] == -1).all()


@pytest.mark.parametrize(("to", "group"), [("bf16", 0), ("i8", 0), ("e4m3", 128)])
def test_rows_are_copied_and_combined(to: str, group: int) -> None:
    random, tokens, top, columns = np.random.default_rng(1), 5, 3, 330
    x = random.standard_normal((tokens, columns)).astype(np.float32)
    places = random.permutation(tokens * top).reshape(tokens, top).astype(np.int32)
    runs, rows = -(-columns // (group or columns)), linear(tokens=top)
    operands = {
        "x": strided("f32", TOKENS, x, 448),
        "places": strided("i32", TOKENS, places, 64),
        "out": empty(to, rows, tokens * top, columns, 448, 384),
    }
    once = {
        "x": operands["x"],
        "q": empty(to, TOKENS, tokens, columns, 448, 384),
        "scale": empty("f32", TOKENS, tokens, runs, 64),
    }
    sizes = step_sizes(tokens=tokens, sequences=1, logit_rows=1)
    if to == "bf16":
        wanted = as_bf16(x)
    else:
        operands["scale"] = empty("f32", rows, tokens * top, runs, 64)
        quantize = CudaCall(kernel_of("QuantizeRows"), {k: v.matrix for k, v in once.items()}, group=group)
        quantize.run(once, sizes)
        wanted = once["q"].values[:tokens, :columns]
    call = CudaCall(kernel_of("SortRows"), {name: one.matrix for name, one in operands.items()}, group=group)
    for schedule in SCHEDULES:
        call.run(operands, sizes, schedule)
        for token, own in enumerate(places):
            for place in own:
                np.testing.assert_array_equal(operands["out"].values[place, :columns], wanted[token])
                assert not operands["out"].values[place, columns:384].any()
                if to != "bf16":
                    scales = once["scale"].values[token, :runs]
                    np.testing.assert_array_equal(operands["scale"].values[place, :runs], scales)


def test_experts_are_combined_in_the_tokens_order() -> None:
    random, tokens, top, columns = np.random.default_rng(2), 5, 3, 330
    places = random.permutation(tokens * top).reshape(tokens, top).astype(np.int32)
    y, share = random.standard_normal((tokens * top, columns)), random.random((tokens, top))
    shared, gate = random.standard_normal((tokens, columns)), random.standard_normal((tokens, 1))
    operands = {
        "y": strided("f32", linear(tokens=top), y.astype(np.float32), 448),
        "places": strided("i32", TOKENS, places, 64),
        "share": strided("f32", TOKENS, share.astype(np.float32), 64),
        "out": empty("f32", TOKENS, tokens, columns, 448),
    }
    expected = np.einsum("tjh,tj->th", y[places], share)
    more = {"shared": strided("f32", TOKENS, shared.astype(np.float32), 448)}
    gated = {**more, "gate": strided("f32", TOKENS, gate.astype(np.float32), 64)}
    opened = shared / (1 + np.exp(-gate))
    for extra, added in (({}, 0.0), (more, shared), (gated, opened)):
        given = {**operands, **extra}
        call = CudaCall(kernel_of("CombineExperts"), {name: one.matrix for name, one in given.items()})
        call.run(given, step_sizes(tokens=tokens, sequences=1, logit_rows=1))
        assert np.abs(given["out"].values[:tokens, :columns] - expected - added).max() < 10 * GEMM_F32


class Experts:
    """A product of several matrices. gemm: of one of them."""

    def __init__(self, gemm: Gemm, counts: Sequence[int]) -> None:
        self.gemm, self.counts = gemm, counts
        self.all = Problem(replace(gemm, rows=gemm.rows * len(counts), epilogue="none"), sum(counts))
        out = replace(buffer_matrix(gemm.to, gemm.outputs), rows=linear(tokens=1))
        operands = {"x": buffer_matrix(gemm.x_type, gemm.columns), "out": out}
        operands["weight"] = Matrix(WEIGHTS[gemm.format], Linear(gemm.rows), gemm.columns, 0, 0, "r16")
        operands["starts"] = Matrix("i32", Linear(1), len(counts) + 1, 64, len(counts) + 1)
        if gemm.x_type != "bf16":
            operands["x_scale"] = buffer_matrix("f32", gemm.groups)
        roles = {"bias": gemm.bias, "zero": gemm.zeros, "scale": gemm.format != "bf16"}
        operands |= {role: Matrix("", Linear(), 0, 0, 0) for role, there in roles.items() if there}
        call = Call(operands, {"epilogue": gemm.epilogue, "group": gemm.group})
        arch = ARCHITECTURES["sm_90a"]
        self.launches = launches_on(arch, call, FORMATS[gemm.format], TILES[gemm.format])

    def run(self, kernels: Kernels, which: int, schedule: str = "forward", seed: int = 0) -> torch.Tensor:
        """Runs one of the launches, whatever the number of rows."""
        gemm, launch, rows = self.gemm, replace_rows(self.launches[which]), sum(self.counts)
        out = empty(gemm.to, linear(tokens=1), rows, gemm.outputs, buffer_matrix(gemm.to, gemm.outputs).stride)
        starts = np.array([0, *accumulate(self.counts)], np.int32)
        operands = {
            "x": Operand(buffer_rows(self.all.x, 99 if gemm.x_type == "i8" else torch.nan), buffer_matrix("f32", 1)),
            "out": out,
            "starts": Operand(starts, buffer_matrix("f32", 1)),
            **{role: Operand(self.packed(role), buffer_matrix("f32", 1)) for role in self.all.weights},
        }
        if gemm.x_type != "bf16":
            operands["x_scale"] = Operand(buffer_rows(self.all.x_scale, torch.nan), buffer_matrix("f32", 1))
        run(kernels, [launch], operands, step_sizes(tokens=rows, sequences=0, logit_rows=0), schedule, seed)
        bits = torch.from_numpy(out.values[:rows, : gemm.outputs].copy())
        assert np.isnan(out.values[rows:]).all() if gemm.to == "f32" else (out.values[rows:] == 0x7FFF).all()
        return (bits.view(torch.int16).view(DTYPES["bf16"]) if gemm.to == "bf16" else bits).double()

    def packed(self, role: str) -> np.ndarray:
        weight, gemm = self.all.weights[role], self.gemm
        if weight.dim() == 1:
            return weight.numpy()
        layout = "r16_columns" if role in ("scale", "zero") else "r16"
        layout += "_pairs" if gemm.epilogue != "none" else ""
        dtype = next((name for name, dtype in DTYPES.items() if dtype == weight.dtype), "")
        dtype = WEIGHTS[gemm.format] if role == "weight" else dtype
        apart = weight.view(len(self.counts), gemm.rows, -1)
        return np.frombuffer(b"".join(pack(apart, PackedForm(dtype, tuple(apart.shape), layout))), np.uint8).copy()

    def expected(self) -> torch.Tensor:
        experts = len(self.counts)
        own = torch.repeat_interleave(torch.arange(experts), torch.tensor(self.counts))
        y = self.all.expected().view(-1, experts, self.gemm.rows)[torch.arange(len(own)), own]
        if self.gemm.epilogue == "none":
            return y
        gate, up = y.chunk(2, dim=1)
        if self.gemm.epilogue == "swiglu":
            return torch.nn.functional.silu(gate) * up
        gate = gate.clamp(max=7)
        return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


def replace_rows(launch: Launch) -> Launch:
    """The launch for any number of rows."""
    return msgspec.structs.replace(launch, low=1, high=2**31 - 1)


COUNTS = (5, 0, 1, 70, 0, 9)
FORMS = [
    Gemm("bf16", 70, 330, bias=True),
    Gemm("bf16", 2 * 37, 130, "swiglu_clamped", bias=True, to="bf16"),
    Gemm("w8a16", 2 * 37, 130, "swiglu"),
    Gemm("fp8a16", 70, 330, group=128, bias=True),
    Gemm("w4a16", 70, 330, group=32, zeros=True),
    Gemm("mxfp4a16", 2 * 35, 130, "swiglu", group=32, to="bf16"),
    Gemm("w8a8", 70, 330, bias=True),
    Gemm("fp8a8", 2 * 37, 330, "swiglu", group=128),
]


SOME_FORMS = FORMS[1::2]  # with each epilogue


def name_of(gemm: Gemm) -> str:
    return f"{gemm.format}-{gemm.epilogue}"


@pytest.mark.parametrize("gemm", SOME_FORMS, ids=name_of)
def test_each_row_meets_its_expert_in_tiles_of_all_sizes(gemm: Gemm) -> None:
    problem = Experts(gemm, COUNTS)
    headers = dict.fromkeys((launch.kernel for launch in problem.launches), "gemm_experts.cuh")
    kernels = Kernels([(header, name) for name, header in headers.items()])
    results = [problem.run(kernels, which) for which in range(len(problem.launches))]
    assert error(results[0], problem.expected()) < gemm.tolerance
    for which, result in enumerate(results):
        assert torch.equal(result, results[0]), "a row has the same bits in tiles of all sizes"
        for schedule in SCHEDULES[1:]:
            assert torch.equal(problem.run(kernels, which, schedule), result), schedule


def test_launches_cover_every_number_of_rows() -> None:
    launches = Experts(FORMS[0], COUNTS).launches
    assert [launch.low for launch in launches] == [1, *(launch.high + 1 for launch in launches[:-1])]
    assert launches[-1].high == 2**31 - 1
    for launch in launches:
        tokens = launch.grid[0].per
        for rows in (1, tokens, 1000):
            sizes = step_sizes(tokens=rows, sequences=0, logit_rows=0)
            assert launch.grid[0].at(sizes, 1) == -(-rows // tokens) + len(COUNTS)


def test_each_barrier_is_missed() -> None:
    """Under one of the orders of warps."""
    problem = Experts(Gemm("w8a8", 70, 330, group=32), (5, 0, 1, 20))
    kernels = Kernels([("gemm_experts.cuh", launch.kernel) for launch in problem.launches])
    whole = problem.run(kernels, 1)
    runs = [*((schedule, 0) for schedule in SCHEDULES[:2]), *(("random", seed) for seed in range(8))]

    def missed(schedule: str, seed: int) -> bool:
        try:
            return not torch.equal(problem.run(kernels, 1, schedule, seed), whole)
        except EmulationError:
            return True

    for site in kernels.sites:
        with kernels.without(site):
            assert any(missed(*one) for one in runs), f"nothing is missed without {site}"


def test_kernels_of_experts_are_compiled() -> None:
    """tests/long has all architectures and formats."""
    check_compiled(SOME_FORMS, ["sm_80"])


def check_compiled(forms: Sequence[Gemm], sms: Sequence[str]) -> None:
    """Checks that nothing is spilled."""
    tokens, three, hidden = TOKENS, linear(tokens=3), 2048
    wide = Matrix("f32", tokens, hidden, hidden + 64, hidden)
    copies, few = Matrix("f32", three, hidden, hidden + 64, hidden), Matrix("i32", tokens, 3, 64, 3)
    routed = {
        "x": wide,
        "weight": Matrix("bf16", Linear(36), hidden, hidden, hidden, "r16_columns"),
        "places": few,
        "share": few,
        "scores": few,
        "correction": wide,
    }
    codes = Matrix("i8", three, hidden, hidden + 64, hidden)
    calls = [
        ("Route", routed, GROUPED),
        ("Route", routed, ROUTING),
        ("SortRows", {"x": wide, "places": few, "out": codes, "scale": few}, {"group": 0}),
        ("QuantizeRows", {"x": copies, "q": codes, "scale": copies}, {"group": 0}),
        ("CombineExperts", {"y": copies, "places": few, "share": few, "out": wide, "shared": wide, "gate": wide}, {}),
    ]
    found: dict[Instance, None] = {}
    for op, operands, attributes in calls:
        for launch in kernel_of(op).launches(Call(operands, attributes)):
            found[Instance(kernel_of(op).sources[launch.kernel.partition("<")[0]], launch.kernel)] = None
    for gemm in forms:
        for launch in Experts(replace(gemm, columns=hidden, rows=1536), COUNTS).launches:
            found[Instance("gemm_experts.cuh", launch.kernel)] = None
    for sm, compiled in compile_kernels(list(found), sms).items():
        assert [one.local_bytes for one in compiled.values()] == [0] * len(found), sm
