"""The kernels of experts, on every instruction set: against float64, and the same bits whatever rows an expert has."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.helpers.gemm_problem import KERNELS, Problem, generator, relative_error, scales_of
from tests.helpers.kernel_runner import ONE_ROW, KernelRunner, Operands, weight
from tests.plugins.test_plugins_values import route
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32, TANH_GELU_SILU

ISAS = _cpu.isa_names()
# Rows of each expert: some have none, few, more than a tile; all to one; one each.
COUNTS = [(5, 0, 1, 33), (0, 0, 23, 0), (1, 1, 1, 1, 1)]


class Experts:
    """Products of several matrices, each with its own rows of x."""

    def __init__(self, kernel: str, counts: Sequence[int], rows: int, columns: int, epilogue: str, **settings: object):
        """rows: of one matrix."""
        self.counts, self.rows, self.epilogue = counts, rows, epilogue
        self.all = Problem(kernel, sum(counts), len(counts) * rows, columns, **settings)  # type: ignore[arg-type]

    def run(self, isa: str, dtype: str, threads: int = 1, kept: torch.Tensor | None = None) -> torch.Tensor:
        """kept: rows of x that are computed, of all, by their indices."""
        kept = torch.arange(sum(self.counts)) if kept is None else kept
        expert = torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))[kept]
        starts = [0, *accumulate(torch.bincount(expert, minlength=len(self.counts)).tolist())]
        runner = KernelRunner(isa, threads, tokens=len(kept))
        gated = self.epilogue != "none"
        out = runner.buffer(len(kept), self.rows // 2 if gated else self.rows, dtype)
        x, packed = self.all.x[kept], "e2m1" if self.all.kernel == "gemm_mxfp4a8@1" else None

        def matrices(values: torch.Tensor, layout: str, dtype: str | None = None) -> _cpu.OperandSpec:
            apart = values.view(len(self.counts), self.rows, -1)
            return weight(apart, f"{layout}_pairs" if gated else layout, dtype)

        operands: Operands = {
            "x": runner.filled(x),
            "weight": matrices(self.all.weight, "r16", packed),
            "starts": runner.filled(torch.tensor([starts], dtype=torch.int32), ONE_ROW),
            "out": out,
            **{name: weight(vector) for name, vector in self.all.vectors.items()},
            **{name: matrices(values, "r16_columns") for name, values in self.all.of_groups.items()},
        }
        attributes: dict[str, int | float | str] = {"epilogue": self.epilogue}
        if x.dtype == torch.int8:
            operands["x_scale"] = runner.filled(scales_of(self.all.x, self.all.group)[kept])
        if x.dtype == torch.int8 or self.all.weight.dtype == torch.float8_e4m3fn:
            attributes["group"] = self.all.group
        runner.call(self.all.kernel, operands, attributes)
        self.work = runner.work()
        assert dtype != "bf16" or not runner.read_pad(out).any()
        return runner.read(out)

    def expected(self) -> torch.Tensor:
        """float64"""
        experts = len(self.counts)
        of_all = self.all.expected().view(-1, experts, self.rows)
        own = torch.repeat_interleave(torch.arange(experts), torch.tensor(self.counts))
        y = of_all[torch.arange(len(own)), own]
        if self.epilogue == "none":
            return y
        gate, up = y.chunk(2, dim=1)
        if self.epilogue == "swiglu":
            return torch.nn.functional.silu(gate) * up
        gate = gate.clamp(max=7)
        return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_row_meets_its_expert(isa: str, kernel: str, counts: Sequence[int]) -> None:
    problem = Experts(kernel, counts, 37, 131, "none", bias=True)
    for threads in (1, 3):
        assert relative_error(problem.run(isa, "f32", threads), problem.expected()) < GEMM_F32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("epilogue", ["swiglu", "swiglu_clamped"])
def test_gated_products_with_bias(isa: str, kernel: str, epilogue: str) -> None:
    problem = Experts(kernel, (3, 0, 18, 1), 42, 131, epilogue, bias=True)
    problem.all.vectors["bias"] *= 4  # beyond the limits of the clamped one
    result = problem.run(isa, "f32", threads=2)
    assert relative_error(result, problem.expected()) < GEMM_F32
    assert relative_error(problem.run(isa, "bf16", threads=2), problem.expected()) < GEMM_BF16_OUT
    if epilogue == "swiglu_clamped":
        gate = problem.all.expected().view(22, 4, 42)[..., :21]
        assert (gate > 7).any() and (gate < -7).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kernel", "settings"),
    [("gemm_w4a8@1", {"zeros": True, "group": 64}), ("gemm_fp8a16@1", {"group": 128}), ("gemm_w8a8@1", {"group": 32})],
)
def test_scales_of_groups_are_the_experts_own(isa: str, kernel: str, settings: dict[str, object]) -> None:
    problem = Experts(kernel, (3, 0, 18, 1), 42, 210, "swiglu", **settings)
    assert relative_error(problem.run(isa, "f32"), problem.expected()) < GEMM_F32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_who_shares_an_expert(isa: str, kernel: str) -> None:
    problem = Experts(kernel, (40, 0, 7, 1, 17), 70, 131, "swiglu")
    together = problem.run(isa, "f32")
    for threads, kept in ((2, range(65)), (1, range(0, 65, 5)), (3, [39]), (1, [0, 40, 47, 48]), (2, range(33, 47))):
        rows = torch.tensor(kept)
        assert torch.equal(together[rows], problem.run(isa, "f32", threads, rows))


def test_work_is_of_experts_that_rows_meet_on_average() -> None:
    few = Experts("gemm_w8a8@1", (0, 1, 0, 0, 0, 0, 0, 0), 64, 64, "none")
    few.run(ISAS[0], "f32")
    many = Experts("gemm_w8a8@1", (8, 9, 8, 7, 8, 8, 8, 8), 64, 64, "none")
    many.run(ISAS[0], "f32")
    of_one = 64 * 64 + 64 * 4
    assert few.work["weight_bytes"] == of_one
    assert 7.9 * of_one < many.work["weight_bytes"] <= 8 * of_one
    assert many.work["int8_ops"] == 64 * few.work["int8_ops"] == 2 * 64 * 64 * 64


def test_operands_that_do_not_fit_are_refused() -> None:
    runner = KernelRunner(ISAS[0], tokens=4)
    x, out = runner.filled(torch.zeros(4, 64, dtype=torch.bfloat16)), runner.buffer(4, 16, "f32")
    stored = weight(torch.zeros(3, 16, 64, dtype=torch.bfloat16), "r16")
    starts = runner.filled(torch.tensor([[0, 1, 4]], dtype=torch.int32), ONE_ROW)
    with pytest.raises(ValueError, match="'weight' is several matrices, but 'starts' is missing"):
        runner.call("gemm_bf16@1", {"x": x, "weight": stored, "out": out}, {"epilogue": "none"})
    with pytest.raises(ValueError, match="must have 4 columns, not 3"):
        runner.call("gemm_bf16@1", {"x": x, "weight": stored, "starts": starts, "out": out}, {"epilogue": "none"})


ROUTING: dict[str, int | float | str] = {
    "top": 3,
    "scores": "softmax",
    "groups": 1,
    "chosen_groups": 1,
    "group_best": 2,
    "normalized": 1,
    "scale": 1.0,
}
GROUPED = {**ROUTING, "scores": "sigmoid", "groups": 4, "chosen_groups": 2, "scale": 2.5}


class Routed:
    """One step of the router, and what came of it."""

    def __init__(
        self,
        isa: str,
        x: torch.Tensor,
        router: torch.Tensor,
        attributes: dict[str, int | float | str],
        threads: int = 1,
        **vectors: torch.Tensor,
    ) -> None:
        tokens, experts, top = len(x), len(router), int(attributes["top"])
        runner = KernelRunner(isa, threads, tokens=tokens)
        places, share = runner.buffer(tokens, top, "i32"), runner.buffer(tokens, top, "f32")
        starts = runner.buffer(1, experts + 1, "i32", ONE_ROW)
        operands: Operands = {
            "x": runner.filled(x),
            "weight": weight(router.bfloat16(), "r16_columns"),
            **{name: weight(vector) for name, vector in vectors.items()},
            "places": places,
            "share": share,
            "starts": starts,
            "scores": runner.buffer(tokens, -(-experts // 16) * 16, "f32"),
        }
        runner.call("route@1", operands, attributes)
        self.places, self.share, self.starts = (runner.read(buffer) for buffer in (places, share, starts))

    @property
    def chosen(self) -> torch.Tensor:
        """The experts, [tokens, top]."""
        return torch.bucketize(self.places, self.starts[0], right=True) - 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("attributes", "names"),
    [
        (ROUTING, []),
        ({**ROUTING, "normalized": 0, "top": 1}, ["bias"]),
        ({**ROUTING, "top": 36}, ["bias", "correction"]),
        (GROUPED, ["correction"]),
        ({**GROUPED, "group_best": 1, "top": 18}, []),
    ],
)
def test_routing_is_numpys(isa: str, attributes: dict[str, int | float | str], names: Sequence[str]) -> None:
    x = torch.randn(61, 131, generator=generator(1))
    router = (torch.randn(36, 131, generator=generator(2)) / 8).bfloat16()
    vectors = {name: torch.randn(36, generator=generator(len(name))) for name in names}
    for tokens, threads in ((61, 1), (3, 2), (1, 3)):
        own = {"x": x[:tokens], "weight": router, **vectors}
        places, share, starts = route({name: v.double().numpy() for name, v in own.items()}, attributes)  # type: ignore[arg-type]
        routed = Routed(isa, x[:tokens], router, attributes, threads, **vectors)
        np.testing.assert_array_equal(routed.starts.numpy(), starts)
        np.testing.assert_array_equal(routed.places.numpy(), places)
        assert np.abs(routed.share.numpy() / share - 1).max() < TANH_GELU_SILU


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_goes_to_the_same_experts_whatever_else_is_routed(isa: str) -> None:
    x, router = torch.randn(70, 131, generator=generator(3)), torch.randn(37, 131, generator=generator(4)) / 8
    together = Routed(isa, x, router, ROUTING)
    for threads, begin, end in ((2, 0, 70), (1, 5, 6), (3, 30, 33), (2, 1, 70)):
        some = Routed(isa, x[begin:end], router, ROUTING, threads)
        assert torch.equal(some.chosen, together.chosen[begin:end])
        assert torch.equal(some.share, together.share[begin:end])


@pytest.mark.parametrize("isa", ISAS)
def test_of_equal_scores_the_lower_expert_is_chosen(isa: str) -> None:
    router = torch.randn(6, 40, generator=generator(5)).repeat(4, 1)  # experts 6 apart are the same
    routed = Routed(isa, torch.randn(9, 40, generator=generator(6)), router, {**ROUTING, "top": 4})
    first = routed.chosen[:, :1]
    assert torch.equal(routed.chosen, first + torch.tensor([0, 6, 12, 18])) and (first < 6).all()
    flat = Routed(isa, torch.zeros(2, 40), router, {**GROUPED, "top": 12})
    assert flat.chosen.tolist() == [list(range(12))] * 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("attributes", [ROUTING, GROUPED], ids=["plain", "groups"])
def test_what_is_not_a_number_stays_in_its_row(isa: str, attributes: dict[str, int | float | str]) -> None:
    x, router = torch.randn(5, 40, generator=generator(7)), torch.randn(36, 40, generator=generator(8)) / 4
    good = Routed(isa, x, router, attributes)
    x[2, 7], x[3, 1] = float("nan"), float("inf")
    routed = Routed(isa, x, router, attributes)
    assert routed.share[2].isnan().all()
    assert sorted(routed.places.flatten().tolist()) == list(range(15))  # each row is somebody's
    others = torch.tensor([0, 1, 4])
    assert torch.equal(routed.share[others], good.share[others])
    assert torch.equal(routed.chosen[others], good.chosen[others])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_rows_are_copied_to_their_places_and_combined_from_there(isa: str, dtype: str) -> None:
    tokens, top, columns = 7, 3, 83
    x = torch.randn(tokens, columns, generator=generator(9))
    places = torch.randperm(tokens * top, generator=generator(10)).view(tokens, top).to(torch.int32)
    for threads in (1, 3):
        runner = KernelRunner(isa, threads, tokens=tokens)
        copies = (0, top, 0, 0, 0, 0)
        rows = runner.buffer(tokens * top, columns, dtype, copies)
        operands: Operands = {"x": runner.filled(x), "places": runner.filled(places), "out": rows}
        if dtype == "i8":
            operands["scale"] = runner.buffer(tokens * top, 3, "f32", copies)
        runner.call("sort_rows@1", operands, {"group": 32 if dtype == "i8" else 0})
        copied = runner.read(rows)
        if dtype == "i8":
            scale = runner.read(operands["scale"]).repeat_interleave(32, 1)[:, :columns]  # type: ignore[arg-type]
            copied = copied * scale
            assert not runner.read_pad(rows).any()
        wanted = {"f32": x, "bf16": x.bfloat16().float(), "i8": x}[dtype]
        for token in range(tokens):
            for place in places[token].tolist():
                assert (copied[place] - wanted[token]).abs().max() <= (0.02 if dtype == "i8" else 0)
        if dtype == "f32":
            share = torch.rand(tokens, top, generator=generator(11))
            out = runner.buffer(tokens, columns, "f32")
            more: Operands = {"y": rows, "places": operands["places"], "share": runner.filled(share), "out": out}
            runner.call("combine_experts@1", more)
            mixed = x.double() * share.double().sum(1, keepdim=True)
            assert relative_error(runner.read(out), mixed) < GEMM_F32
            shared, gate = torch.randn(tokens, columns), torch.randn(tokens, 1)
            more |= {"shared": runner.filled(shared)}
            runner.call("combine_experts@1", more)
            assert relative_error(runner.read(out), mixed + shared) < GEMM_F32
            runner.call("combine_experts@1", more | {"gate": runner.filled(gate)})
            assert relative_error(runner.read(out), mixed + shared * gate.double().sigmoid()) < GEMM_F32


def test_routing_that_does_not_fit_is_refused() -> None:
    x, router = torch.randn(2, 40), torch.randn(36, 40)
    for changed, why in (
        ({"top": 37}, "'top' must be in 1 … 36"),
        ({"groups": 5, "chosen_groups": 2}, "cannot be cut into so many groups"),
        ({"groups": 12, "chosen_groups": 1, "top": 4}, "fewer than 'top' experts"),
        ({"groups": 36, "chosen_groups": 36}, "fewer than 'group_best' experts"),
        ({"scores": "relu"}, "must be softmax or sigmoid"),
    ):
        with pytest.raises(ValueError, match=why):
            Routed(ISAS[0], x, router, {**ROUTING, **changed})
