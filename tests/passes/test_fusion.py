"""Fusions where a pattern is nearly the one they know: small graphs, each with a node that must stay as it is."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from enginewright.passes.fusion.round_in_producer import RoundInProducer
from enginewright.passes.fusion.swiglu import FuseSwiGlu
from enginewright.passes.graph import standard, typed
from enginewright.passes.pass_manager import Pass, PassResult, check_graph
from enginewright.plugins.gemm.gemm_bf16 import GEMM_BF16
from enginewright.plugins.gemm.gemm_w8a8 import GEMM_W8A8
from enginewright.plugins.gemm.quantize_rows import QUANTIZE_ROWS
from enginewright.plugins.norm.add_rms_norm import ADD_RMS_NORM
from enginewright.plugins.norm.rms_norm import RMS_NORM
from tests.helpers.onnx_run import Array, run

FLOAT, BFLOAT16, INT8 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT8
DTYPES = {FLOAT: np.float32, BFLOAT16: ml_dtypes.bfloat16, INT8: np.int8}
TOKENS, WIDTH = 7, 5


def whole(inputs: list[ir.Value], outputs: list[ir.Value], nodes: list[ir.Node]) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 24, "enginewright": 1})
    model = ir.Model(graph, ir_version=10)
    check_graph(model)
    return model


def named(node: ir.Node, *names: str) -> list[ir.Value]:
    node.name = names[0]
    for value, name in zip(node.outputs, names, strict=True):
        value.name = name
    return [*node.outputs]


def cast(value: ir.Value, name: str, to: ir.DataType) -> tuple[ir.Node, ir.Value]:
    assert value.shape is not None
    output = typed(name, to, value.shape.dims)
    return standard("Cast", [value], [output], name, to=int(to)), output


def add_and_norm(rounded: str) -> ir.Model:
    """A residual and its norm, one of which ("sum" or "normed") is only read rounded."""
    x, delta, weight = (typed(name, FLOAT, ("tokens", WIDTH)[-n:]) for name, n in (("x", 2), ("delta", 2), ("w", 1)))
    node = ADD_RMS_NORM.node([x, delta, weight], epsilon=1e-6, to=int(FLOAT), group=0)
    outputs = dict(zip(("sum", "normed"), named(node, "sum", "normed"), strict=True))
    low, outputs[rounded] = cast(outputs[rounded], "low", BFLOAT16)
    return whole([x, delta, weight], [*outputs.values()], [node, low])


def rounded_and_back() -> ir.Model:
    """A norm that is rounded already, and is read in FLOAT."""
    x, weight = typed("x", FLOAT, ("tokens", WIDTH)), typed("w", FLOAT, (WIDTH,))
    node = RMS_NORM.node([x, weight], epsilon=1e-6, to=int(BFLOAT16), group=0)
    up, output = cast(*named(node, "norm"), "up", FLOAT)
    return whole([x, weight], [output], [node, up])


def quantized(value: ir.Value, name: str) -> tuple[ir.Node, list[ir.Value]]:
    node = QUANTIZE_ROWS.node([value], to=int(INT8), group=32)
    return node, named(node, name, f"{name}.scale")


def norm_and_quantized(op: str, readers: str = "") -> ir.Model:
    """A norm whose result is quantized, and what else reads it: a Cast, or nothing."""
    x, delta, weight = (typed(name, FLOAT, ("tokens", WIDTH)[-n:]) for name, n in (("x", 2), ("delta", 2), ("w", 1)))
    inputs = [x, delta, weight]
    if op == "AddRmsNorm":
        norm = ADD_RMS_NORM.node(inputs, epsilon=1e-6, to=int(FLOAT), group=0)
        total, normed = named(norm, "sum", "normed")
        outputs = [total]
    else:
        normed, outputs = typed("normed", FLOAT, ("tokens", WIDTH)), []
        norm, inputs = standard(op, [x, weight], [normed], "normed", epsilon=1e-6), [x, weight]
    node, codes = quantized(normed, "q")
    nodes = [norm, node]
    outputs += codes
    if readers == "Cast":
        node, low = cast(normed, "low", BFLOAT16)
        nodes, outputs = [*nodes, node], [*outputs, low]
    return whole(inputs, outputs, nodes)


def product_and_quantized() -> ir.Model:
    x, weight = typed("x", BFLOAT16, ("tokens", WIDTH)), typed("w", BFLOAT16, (12, WIDTH))
    gemm = GEMM_BF16.node([x, weight], epilogue="none", to=int(FLOAT))
    (product,) = named(gemm, "product")
    node, codes = quantized(product, "q")
    return whole([x, weight], codes, [gemm, node])


def product_of_groups_and_rounded() -> ir.Model:
    """A product of int8 activations in groups, which is only read as bfloat16."""
    x, weight, scale = typed("x", FLOAT, ("tokens", 70)), typed("w", INT8, (12, 70)), typed("s", FLOAT, (12,))
    rounded, codes = quantized(x, "q")
    gemm = GEMM_W8A8.node([codes[0], weight, codes[1], scale, None], epilogue="none", to=int(FLOAT), group=32)
    node, low = cast(*named(gemm, "product"), "low", BFLOAT16)
    return whole([x, weight, scale], [low], [rounded, gemm, node])


def gated(epilogue: str) -> ir.Model:
    """silu(gate) · up of the halves of what a matrix product gives, which has this epilogue itself."""
    x, weight = typed("x", BFLOAT16, ("tokens", WIDTH)), typed("w", BFLOAT16, (12, WIDTH))
    gemm = GEMM_BF16.node([x, weight], epilogue=epilogue, to=int(FLOAT))
    (product,) = named(gemm, "product")
    half = 6 if epilogue == "none" else 3
    gate, up, sigmoid, silu, y = (
        typed(name, FLOAT, ("tokens", half)) for name in ("gate", "up", "sigmoid", "silu", "y")
    )
    nodes = [
        gemm,
        standard("Split", [product], [gate, up], "split", axis=-1, num_outputs=2),
        standard("Sigmoid", [gate], [sigmoid], "sigmoid"),
        standard("Mul", [gate, sigmoid], [silu], "silu"),
        standard("Mul", [silu, up], [y], "y"),
    ]
    return whole([x, weight], [y], nodes)


def results(model: ir.Model) -> dict[str, Array]:
    random = np.random.default_rng(4)
    feeds: dict[str, Array] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        shape = [dim if isinstance(dim, int) else TOKENS for dim in value.shape]
        numbers = random.standard_normal(shape).astype(np.float32)
        if value.dtype == INT8:
            numbers *= 40
        feeds[str(value.name)] = numbers.astype(DTYPES[value.dtype])
    return run(model, feeds)


@pytest.mark.parametrize(
    ("model", "own", "sentence"),
    [
        (add_and_norm("sum"), RoundInProducer(), "sum (AddRmsNorm) cannot round."),
        (rounded_and_back(), RoundInProducer(), "norm (RmsNorm) cannot round."),
        (product_and_quantized(), RoundInProducer(), "product (GemmBf16) cannot quantize."),
        (gated("swiglu"), FuseSwiGlu(), "product has an epilogue already, and y would be its second."),
    ],
    ids=["sum", "rounded and back", "quantized product", "gated twice"],
)
def test_what_only_looks_like_the_pattern_is_left_alone(model: ir.Model, own: Pass, sentence: str) -> None:
    before, ops = results(model), [node.op_type for node in model.graph]
    assert own(model) == PassResult(0, (sentence,))
    check_graph(model)
    assert [node.op_type for node in model.graph] == ops
    _same(results(model), before)


@pytest.mark.parametrize(
    ("model", "own", "left"),
    [
        (add_and_norm("normed"), RoundInProducer(), ["AddRmsNorm"]),
        (norm_and_quantized("AddRmsNorm"), RoundInProducer(), ["AddRmsNorm"]),
        (norm_and_quantized("RMSNormalization"), RoundInProducer(), ["RmsNorm"]),
        (product_of_groups_and_rounded(), RoundInProducer(), ["QuantizeRows", "GemmW8A8"]),
        (gated("none"), FuseSwiGlu(), ["GemmBf16"]),
    ],
    ids=["normed", "quantized sum", "quantized", "product of groups", "gated"],
)
def test_the_pattern_next_to_it_is_fused(model: ir.Model, own: Pass, left: list[str]) -> None:
    before = results(model)
    assert own(model).rewrites == 1
    check_graph(model)
    assert [node.op_type for node in model.graph] == left
    after = results(model)
    assert len(after) == len(before)
    for one, other in zip(before.values(), after.values(), strict=True):
        np.testing.assert_array_equal(other, one, strict=True)


def test_a_norm_is_not_quantized_for_some_of_its_readers() -> None:
    model = norm_and_quantized("AddRmsNorm", "Cast")
    assert RoundInProducer()(model) == PassResult(0, ("normed is used unrounded, too.",) * 2)
    assert len(model.graph) == 3


def _same(after: dict[str, Array], before: dict[str, Array]) -> None:
    assert after.keys() == before.keys()
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected, name, strict=True)
