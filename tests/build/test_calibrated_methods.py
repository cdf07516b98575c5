"""Methods that look at activations: what they may move without changing a model, and what they gain by it."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright.errors import EngineError, UsageError
from enginewright.passes.graph import LinearLayer, nodes_of
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.pipeline import run_for_target, run_pipeline
from enginewright.passes.quant import W8A8, Int4Awq, Int4Gptq, Int4Rtn, Int8Sq, Int8Wo, QuantConfig, quant_config
from enginewright.passes.quant.auto import FORMATS, Auto, Mix, assigned, bits_of, free_weights, measured
from enginewright.passes.quant.int4_awq import by_importance
from enginewright.passes.quant.int4_codes import codes_of, fitted, nearest
from enginewright.passes.quant.method import Calibration, stored
from enginewright.passes.quant.smoothing_sites import sites
from enginewright.passes.streaming import stream
from enginewright.passes.temporary_tensors import TemporaryTensors
from enginewright.passes.weights import open_rows, read
from enginewright.plugins.target import CudaTarget
from tests import tolerances
from tests.helpers.graphs import CASES, DenseRun, dense_graph, graph_before, random_tokens, relative_error

TEXTS = [random_tokens(length, seed).tolist() for seed, length in enumerate((40, 1, 61))]
CALIBRATED: list[QuantConfig] = [
    Int8Sq(),
    Int8Sq(0),
    Int8Sq(activation_scheme="static"),
    Int8Sq(0, "static"),
    Int4Awq(),
    Int4Awq(64, True),
    Int4Gptq(),
    Int4Gptq(32, True, False),
]


def fused_graph(case: str) -> ir.Model:
    model, own = graph_before(case, "fuse_gate_up")
    own(model)
    return model


@pytest.mark.parametrize("case", CASES)
def test_scaling_the_sites_changes_no_result(case: str) -> None:
    model = fused_graph(case)
    expected = DenseRun(model).step(TEXTS[0])
    found, refusals = sites(model)
    assert (len(found), refusals) == (4 * 3, [])
    random = torch.Generator().manual_seed(1)
    for site in found:
        site.apply(torch.exp2(6 * torch.rand(site.experts, site.channels, generator=random) - 3))
    seen: list[float] = []

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        largest = torch.cat(linear.rows_of(0, inputs)).abs().amax(0)
        seen.append(float(largest.max() / largest.median()))

    logits = stream(model, [TEXTS[0]], visit).logits(0, 0, len(TEXTS[0]))
    assert np.abs(logits.numpy() - expected).max() < tolerances.DENSE_LOGITS
    assert min(seen) > 3  # channels did change


def test_what_others_read_is_not_scaled() -> None:
    model = fused_graph("llama")
    gated = next(node for node in nodes_of(model, "Mul") if node.outputs[0].name == "layers.1.mlp.gated")
    model.graph.outputs.append(gated.outputs[0])
    found, refusals = sites(model)
    assert len(found) == 11
    assert refusals == ["The input of layers.1.mlp.down_proj cannot be scaled: ops other than linear layers read it."]


@pytest.mark.parametrize("quant", CALIBRATED, ids=str)
def test_the_graph_stays_near_and_is_the_same_whatever_the_threads(quant: QuantConfig) -> None:
    plain = dense_graph("llama")
    expected = stream(plain, [TEXTS[2]]).logits(0, 0, 61)
    weights = []
    for threads in (1, 3):
        model = fused_graph("llama")
        results = run_passes(model, quant.prepare(Calibration(TEXTS, threads)))
        assert results["smooth" if "smooth" in results else "choose_codes"].rewrites == 12
        logits = stream(model, [TEXTS[2]]).logits(0, 0, 61)
        assert relative_error(logits.numpy(), expected.numpy()) < tolerances.ENGINE_LOGITS["int4-rtn"]
        weights.append([read(value) for value in model.graph.initializers.values()])
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two)


def outlier_model() -> ir.Model:
    """A model whose norms make a channel of each layer's input a hundred times as large as the others."""
    model = fused_graph("llama")
    for index, node in enumerate(nodes_of(model, "RMSNormalization")):
        weight = node.inputs[1]
        assert weight is not None
        values = read(weight).clone()
        values[(7 * index) % len(values)] *= 100
        weight.const_value = ir.tensor_adapters.TorchTensor(values)
    return model


def output_error(model: ir.Model, quant: QuantConfig) -> float:
    """Error of the logits if every linear layer's weight and input are rounded by a method."""
    exact = stream(model, TEXTS).logits(2, 0, 61)
    run_passes(model, quant.prepare(Calibration(TEXTS)))
    errors = []

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        weight, x = read(linear.weight), torch.cat(list(inputs))
        kept = weight if stored(linear.weight) else quant.restore(*quant.quantize(weight, "weight"))
        y = x @ weight.t()
        errors.append(float((quant.round_activations(x) @ kept.t() - y).norm() / y.norm()))

    logits = stream(model, TEXTS, visit).logits(2, 0, 61)
    assert isinstance(quant, Int4Gptq | Int4Awq) or float((logits - exact).norm() / exact.norm()) < 1e-4
    return float(np.mean(errors))


def test_smoothing_helps_where_channels_stick_out() -> None:
    assert output_error(outlier_model(), Int8Sq(0)) < output_error(outlier_model(), W8A8(0)) / 2


def correlated(tokens: int, columns: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(2)
    mixing = torch.randn(columns // 4, columns, generator=random)
    x = torch.randn(tokens, columns // 4, generator=random) @ mixing
    x[:, ::9] *= 12
    return x + 0.1 * torch.randn(tokens, columns, generator=random)


def chosen(config: Int4Gptq, inputs: Sequence[torch.Tensor], weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return config.study(inputs, 1)(config, weight)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("group", "columns"), [(32, 111), (64, 37), (0, 70)])
def test_chosen_codes_leave_less_error_than_the_nearest(group: int, columns: int, zero_points: bool) -> None:
    """The error of a layer's output is smaller than with nearest codes, and smallest by methods that use more data."""
    x, weight = correlated(400, columns), torch.randn(33, columns, generator=torch.Generator().manual_seed(3))
    weight[5] = 0

    def error(parts: Sequence[torch.Tensor]) -> float:
        return float(((Int4Rtn(group, zero_points).restore(*parts) - weight) @ x.t()).norm() / (weight @ x.t()).norm())

    texts = [x[:150], x[150:]]
    rtn = error(Int4Rtn(group, zero_points).quantize(weight, "weight"))
    fit = error(by_importance(texts, 1)(Int4Rtn(group, zero_points), weight))
    gptq = error(chosen(Int4Gptq(group, zero_points, act_order=False), texts, weight))
    ordered = error(chosen(Int4Gptq(group, zero_points), texts, weight))
    assert fit < rtn
    assert gptq < 0.7 * fit
    assert ordered < 0.7 * fit


def test_gptq_is_the_papers_recursion() -> None:
    """Columns are rounded one after the other; after each, the later ones are solved for again, in float64."""
    columns, config = 20, Int4Gptq(0, act_order=False)
    x, weight = correlated(100, columns), torch.randn(3, columns, generator=torch.Generator().manual_seed(4))
    codes, scale = chosen(config, [x], weight)
    h = (x.t() @ x / len(x)).double().numpy()
    h += 0.01 * np.trace(h) / columns * np.eye(columns)
    rest, step = weight.double().numpy(), scale.double().numpy()[:, 0]
    for column in range(columns):
        expected = np.clip(np.rint(rest[:, 0] / step), -8, 7)
        np.testing.assert_array_equal(codes[:, column].numpy().astype(int) - 8, expected)
        inverse = np.linalg.inv(h[column:, column:])
        rest = (rest - np.outer((rest[:, 0] - expected * step) / inverse[0, 0], inverse[0]))[:, 1:]


def test_importance_moves_the_scale() -> None:
    """A run whose largest weight hardly matters is clipped."""
    weight = torch.tensor([[8.0, 1.1, -0.9, 0.4]])
    scale, _ = nearest(weight, 4, zero_points=False)
    lone, zero = fitted(weight, 4, False, torch.tensor([1e-6, 1.0, 1.0, 1.0]))
    assert abs(float(lone)) < abs(float(scale))
    assert codes_of(weight, 4, lone, zero)[0, 0] in (0, 15)


def test_an_engine_of_a_calibrated_method_is_its_formats() -> None:
    for quant, op in ((Int4Gptq(), "GemmW4A8"), (Int8Sq(), "GemmW8A8")):
        model, results = run_pipeline(dense_graph("qwen3"), quant, calibration=Calibration(TEXTS))
        assert len(list(nodes_of(model, op, domain="enginewright"))) == (12 if op == "GemmW4A8" else 13)
        assert not results["fuse_swiglu"].refusals


@pytest.mark.parametrize("quant", [Int4Awq(), Int4Gptq(), Auto()], ids=lambda quant: quant.name)
def test_codes_that_were_chosen_are_in_the_graphs_of_all_targets(quant: QuantConfig) -> None:
    dense: list[ir.Model] = []
    model, _ = run_pipeline(dense_graph("llama"), quant, calibration=Calibration(TEXTS), keep=dense.append)
    other = run_for_target(dense[0].clone(), quant, CudaTarget())
    for name in ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.2.mlp.down_proj.weight.scale"):
        here, there = (graph.graph.initializers[name] for graph in (model, other))
        assert here is not there and torch.equal(read(here), read(there))


def test_static_scales_are_of_what_was_seen() -> None:
    """The engine's graph has a scale for each group of a layer's input columns, and none for the head's."""
    quant = Int8Sq(32, "static")
    streamed: dict[str, torch.Tensor] = {}

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        streamed[str(linear.weight.name)] = torch.nn.functional.pad(torch.cat(list(inputs)).abs(), (0, 96)).amax(0)

    smoothed = fused_graph("llama")
    run_passes(smoothed, quant.prepare(Calibration(TEXTS))[:1])
    stream(smoothed, TEXTS, visit)
    model, _ = run_pipeline(dense_graph("llama"), quant, calibration=Calibration(TEXTS))
    given = {}
    for gemm in nodes_of(model, "GemmW8A8", domain="enginewright"):
        rounding = gemm.inputs[0].producer()  # type: ignore[union-attr]
        last = rounding.inputs[-1]  # type: ignore[union-attr]
        given[str(gemm.inputs[1].name)] = last if str(last.name).endswith(".largest") else None  # type: ignore[union-attr]
    assert len(given) == 13 and [name for name, value in given.items() if value is None] == ["lm_head.weight"]
    for name, seen in streamed.items():
        largest = read(given[name])  # type: ignore[arg-type]
        expected = seen[: 32 * len(largest)].view(-1, 32).amax(1)
        torch.testing.assert_close(largest, expected, rtol=2**-8, atol=0)


def test_settings() -> None:
    with pytest.raises(UsageError, match="--activation-scheme both is not known: there are dynamic, static"):
        quant_config("int8-sq", activation_scheme="both")
    assert quant_config("int4-gptq", group_size=64, damping="0.05") == Int4Gptq(64, damping="0.05")
    for damping in ("0", "1", "5", "-0.1", "nan", "much"):  # 1 and 5 were percents once
        with pytest.raises(UsageError, match=f"--damping {damping} is not possible: it is a fraction"):
            Int4Gptq(damping=damping)
    with pytest.raises(UsageError, match="--damping means nothing to --quant int8-wo: it is a setting of int4-gptq"):
        quant_config(Int8Wo.info.name, damping="0.01")


def test_a_temporary_file_without_room_says_where(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"weights cannot be stored in .*missing: No such file"):
        TemporaryTensors(tmp_path / "missing")


def test_temporary_tensors_give_back_what_they_were_given() -> None:
    temporary, random = TemporaryTensors(), torch.Generator().manual_seed(0)
    given = [
        (torch.randn(7, 5, generator=random).to(dtype), dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    ]
    values = [temporary.add((str(dtype), dtype, (7, 5)), data) for data, dtype in given]
    for value, (data, _) in zip(values, given, strict=True):
        assert torch.equal(open_rows(value)(2, 6).float(), data[2:6].float())


def small_weights(count: int) -> list[ir.Value]:
    return [ir.Value(name=f"w{index}", shape=ir.Shape((8 + index, 256))) for index in range(count)]


@pytest.mark.parametrize("bits", [4.2, 4.5, 5.5, 8.2, 11.0])
def test_bits_are_spent_nearly_as_well_as_can_be(bits: float) -> None:
    """Against all assignments there are."""
    weights, random = small_weights(5), np.random.default_rng(int(10 * bits))
    costs = {weight: sorted(random.exponential(size=len(FORMATS)), reverse=True) for weight in weights}
    sizes = {weight: [bits_of(config, weight) for config in FORMATS] for weight in weights}
    budget = bits * sum(int(weight.shape.numpy()[0]) * 256 for weight in weights if weight.shape)

    def total(choice: Sequence[int], of: Mapping[ir.Value, Sequence[float]]) -> float:
        return sum(of[weight][index] for weight, index in zip(weights, choice, strict=True))

    chosen = [FORMATS.index(config) for config in assigned(weights, costs, bits).values()]
    fitting = [each for each in product(range(len(FORMATS)), repeat=5) if total(each, sizes) <= budget]
    costs_of = sorted(total(each, costs) for each in fitting)
    assert tuple(chosen) in fitting
    assert total(chosen, costs) <= costs_of[len(costs_of) // 50]  # among the best fiftieth


def test_a_layer_that_minds_costs_more_and_gets_more_bits() -> None:
    """One whose weights are far from each other within a run."""
    model = fused_graph("llama")
    weights, calibration = free_weights(model), Calibration(TEXTS)
    before = measured(model, weights, calibration)
    down = model.graph.initializers["model.layers.1.mlp.down_proj.weight"]
    spread = read(down) * torch.exp2(6 * torch.rand(74, generator=torch.Generator().manual_seed(0)) - 3)
    down.const_value = ir.tensor_adapters.TorchTensor(spread)
    costs = measured(model, weights, calibration)
    assert costs[down][0] > 2 * before[down][0]
    assert all(of[0] > of[3] > of[4] >= 0 for of in costs.values())
    formats = assigned(weights, costs, 6.0)
    assert FORMATS.index(formats[down]) > FORMATS.index(assigned(weights, before, 6.0)[down])
    run_passes(model, [Mix(6.0, calibration)])
    kept = stored(down)
    assert kept is not None and kept.stored_as == formats[down]


@pytest.mark.parametrize("bits", ["4", "17", "many", "nan"])
def test_an_impossible_budget_is_refused(bits: str) -> None:
    with pytest.raises(UsageError, match=f"--bits {bits} is not possible"):
        Auto(bits=bits)


def test_a_budget_below_the_smallest_format_says_what_it_takes() -> None:
    weights = small_weights(2)
    with pytest.raises(UsageError, match=r"(?s)takes 4\.125 bits a weight.*Use 4\.13 or more"):
        assigned(weights, {weight: [0.0] * len(FORMATS) for weight in weights}, 4.1)
