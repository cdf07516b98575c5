"""Passes over the dense graph: what onnxruntime computes before and after is the same."""

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright.errors import EngineError
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.quant import Bf16, Fp8, Int4Rtn, Int8Wo, Mxfp4, QuantConfig, fp8, int4_codes
from enginewright.passes.quant.int8_wo import quantize_rows
from enginewright.passes.quant.quantize import Quantize
from enginewright.passes.weights import read
from enginewright.plugins.target import CPU_TARGET, CudaTarget
from tests import tolerances
from tests.helpers.breadth import every_third
from tests.helpers.graphs import (
    CASES,
    QUANTS,
    DenseRun,
    checkpoint_of,
    dense_graph,
    graph_before,
    random_tokens,
    relative_error,
)
from tests.helpers.onnx_run import Array, run

STEPS = (11, 1, 4)  # tokens
bfloat16 = ml_dtypes.bfloat16


def everything(model: ir.Model) -> dict[str, Array]:
    """Logits of all STEPS, and what is present after the last."""
    dense, tokens = DenseRun(model), random_tokens(sum(STEPS), seed=3)
    parts = [dense.step(part) for part in np.split(tokens, np.cumsum(STEPS)[:-1])]
    return {"logits": np.concatenate(parts), **dense.past}


PASSES = ("cleanup", "fuse_qkv", "fuse_gate_up", "fuse_residual_norm", "fuse_swiglu")
WITH_PASSES = [(case, name) for case in CASES for name in PASSES]
WITH_QUANTS = [(case, quant) for case in CASES for quant in QUANTS]
SOME_WITH_PASSES, SOME_WITH_QUANTS = every_third(CASES, PASSES), every_third(CASES, QUANTS)


def name_of(value: object) -> str:
    return value if isinstance(value, str) else str(getattr(value, "name", value))


@pytest.mark.parametrize(("case", "name"), SOME_WITH_PASSES)
def test_results_are_the_same_before_and_after(name: str, case: str) -> None:
    model, own = graph_before(case, name)
    before = everything(model)
    (result,) = run_passes(model, [own]).values()
    assert (result.rewrites > 0, result.refusals) == (name != "cleanup", ())
    after = everything(model)
    assert before.keys() == after.keys()
    for output, expected in before.items():
        # A product with more columns may be summed in another order; all else is the same operations.
        if name in ("fuse_qkv", "fuse_gate_up"):
            assert np.abs(after[output] - expected).max() < tolerances.DENSE_LOGITS, output
        else:
            np.testing.assert_array_equal(after[output], expected, output)


def test_cleanup_removes_what_nothing_reads() -> None:
    model, own = graph_before("llama", "cleanup")
    size, weights = len(model.graph), len(model.graph.initializers)
    extra = ir.Value(
        name="extra",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape((48,)),
        const_value=ir.tensor(np.ones(48, np.float32), name="extra"),
    )
    model.graph.register_initializer(extra)
    for op_type in ("Sigmoid", "Tanh"):
        extra_node = ir.Node("", op_type, [extra], num_outputs=1)
        model.graph.append(extra_node)
        (extra,) = extra_node.outputs
        extra.type, extra.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((48,))
    assert own(model).rewrites == 2
    assert (len(model.graph), len(model.graph.initializers)) == (size, weights)


@pytest.mark.parametrize("case", CASES)
def test_fused_weights_are_the_siblings_one_below_the_other(case: str) -> None:
    model, own = graph_before(case, "fuse_qkv")
    own(model)
    stored = checkpoint_of(case).stored
    biased = "model.layers.0.self_attn.q_proj.bias" in stored
    for kind in ("weight", "bias") if biased else ("weight",):
        fused = read(model.graph.initializers[f"model.layers.1.self_attn.qkv_proj.{kind}"])
        parts = [stored[f"model.layers.1.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        torch.testing.assert_close(fused, torch.cat(parts).float(), rtol=0, atol=0)
        assert f"model.layers.1.self_attn.q_proj.{kind}" in model.graph.initializers  # until cleanup


TABLES = ("model.embed_tokens.weight", "lm_head.weight", "table", "head")


def numpy_weight(name: str, weight: torch.Tensor, quant: QuantConfig) -> list[Array]:
    """Quantizes a weight [N, K] in numpy; gives the arrays of its initializers: values, then scales."""
    exact = weight.float().numpy()
    if isinstance(quant, Bf16):
        return [exact.astype(bfloat16)]
    if isinstance(quant, Int4Rtn) and name not in TABLES:
        return numpy_int4(exact, quant.group_size)
    if isinstance(quant, Mxfp4) and name not in TABLES:
        return numpy_mxfp4(exact)
    is_fp8 = isinstance(quant, Fp8) and name not in TABLES
    scale = np.abs(exact).max(axis=1) / np.float32(448 if is_fp8 else 127)
    codes = np.divide(exact, scale[:, None], out=np.zeros_like(exact), where=scale[:, None] > 0)
    return [codes.astype(ml_dtypes.float8_e4m3fn) if is_fp8 else np.rint(codes).astype(np.int8), scale]


def numpy_int4(exact: Array, group: int) -> list[Array]:
    """Quantizes group by group: the number of amax becomes -8, the scale is fitted, codes are chosen again."""
    codes = np.full(exact.shape, 8, np.uint8)
    scales = np.zeros((len(exact), -(-exact.shape[1] // group)), bfloat16)
    for n, g in np.ndindex(scales.shape):
        run = exact[n, g * group : (g + 1) * group].astype(np.float64)
        if run.any():
            largest = run.min() if -run.min() >= run.max() else run.max()
            first = float(bfloat16(largest / -8))
            fitted = np.clip(np.rint(run / first), -8, 7)
            scales[n, g] = bfloat16(run @ fitted / (fitted @ fitted))
            codes[n, g * group : (g + 1) * group] = 8 + np.clip(np.rint(run / float(scales[n, g])), -8, 7)
    return [codes, scales]


def numpy_mxfp4(exact: Array) -> list[Array]:
    """Run by run: the power of two that leaves less error, of the specification's and the next."""
    codes = np.zeros(exact.shape, np.uint8)
    scales = np.zeros((len(exact), -(-exact.shape[1] // 32)), bfloat16)
    for n, g in np.ndindex(scales.shape):
        run = exact[n, g * 32 : (g + 1) * 32].astype(np.float64)
        first = np.floor(np.log2(np.abs(run).max())) - 2 if run.any() else -125
        rounded = [(run / 2**power).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn) for power in (first, first + 1)]
        errors = [
            ((run / 2**first - numbers.astype(float) * 2**more) ** 2).sum() for more, numbers in enumerate(rounded)
        ]
        best = int(errors[1] < errors[0])
        scales[n, g] = 2 ** (first + best) / 2
        codes[n, g * 32 : (g + 1) * 32] = rounded[best].view(np.uint8)
    return [codes, scales]


def numpy_values(model: ir.Model, name: str) -> Array:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


@pytest.mark.parametrize(("case", "quant"), SOME_WITH_QUANTS, ids=name_of)
def test_quantized_weights_are_numpys(case: str, quant: QuantConfig) -> None:
    model, own = graph_before(case, f"quantize_{quant.name.replace('-', '_')}", quant)
    own(model)
    stored, config = checkpoint_of(case).stored, checkpoint_of(case).config
    compared = set()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for fused, parts in (
            ("self_attn.qkv_proj", [f"self_attn.{part}_proj" for part in "qkv"]),
            ("self_attn.o_proj", ["self_attn.o_proj"]),
            ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
            ("mlp.down_proj", ["mlp.down_proj"]),
        ):
            if f"{prefix}.{parts[0]}.weight" not in stored:  # a layer with experts
                continue
            weight = torch.cat([stored[f"{prefix}.{part}.weight"] for part in parts])
            compared |= _compare(model, f"{prefix}.{fused}.weight", weight, quant)
    for name in stored:
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            compared |= _compare(model, name, stored[name], quant)
        elif ".experts." in name:
            compared |= _compare(model, name, stored[name].flatten(0, 1), quant)
        elif name.endswith("mlp.gate.weight"):
            compared |= _compare(model, name, stored[name], Bf16())
    # Nothing but these was quantized: norms and biases stay as they are.
    others = {name: value for name, value in model.graph.initializers.items() if name not in compared}
    assert {value.dtype for value in others.values()} <= {ir.DataType.FLOAT, ir.DataType.INT64}


def _compare(model: ir.Model, name: str, weight: torch.Tensor, quant: QuantConfig) -> set[str]:
    names = [name, f"{name}.scale"][: 1 if isinstance(quant, Bf16) else 2]
    for own, expected in zip(names, numpy_weight(name, weight, quant), strict=True):
        actual = numpy_values(model, own)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected, own)
    return set(names)


@pytest.mark.parametrize(("case", "quant"), SOME_WITH_QUANTS, ids=name_of)
def test_quantized_logits_are_near(case: str, quant: QuantConfig) -> None:
    model, own = graph_before(case, f"quantize_{quant.name.replace('-', '_')}", quant)
    exact = everything(model)["logits"]
    result = own(model)
    assert result.refusals == ()
    quantized = everything(model)["logits"]
    error = relative_error(quantized, exact)
    assert 1e-8 < error < tolerances.ENGINE_LOGITS[quant.name]


def test_rows_are_quantized_half_to_even() -> None:
    weight = torch.tensor(
        [[127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 126.5], [0.0] * 7, [-254.0, 1.0, 3.0, 253.0, 2.0, -1.0, 5.0]]
    )
    codes, scale = quantize_rows(weight)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 126], [0] * 7, [-127, 0, 2, 126, 1, 0, 2]]
    assert scale.tolist() == [1.0, 0.0, 2.0]
    # A scale that is itself rounded, to 2 of the smallest numbers there are, where 300 / 127 was meant.
    codes, scale = quantize_rows(torch.tensor([[300.0, -300.0, 100.0]]) * 2.0**-149)
    assert (codes.tolist(), scale.tolist()) == ([[127, -127, 50]], [2.0**-148])


def test_rows_become_fp8_half_to_even() -> None:
    """Between 256 and 448 fp8 has steps of 32; below 2^-6, of 2^-9."""
    row = [448.0, 271.0, 272.0, 304.0, -336.0, 2.0**-9, 1.5 * 2.0**-9, 2.5 * 2.0**-9, -(2.0**-10), 0.51 * 2.0**-9]
    expected = [448.0, 256.0, 256.0, 320.0, -320.0, 2.0**-9, 2.0**-8, 2.0**-8, 0.0, 2.0**-9]
    codes, scale = Fp8().quantize(torch.tensor([row, [0.0] * 10, [value / 2 for value in row]]), "weight")
    assert codes.float().tolist() == [expected, [0.0] * 10, expected]
    assert scale.tolist() == [1.0, 0.0, 0.5]


def test_scales_of_fp8() -> None:
    """One for all; one for each 128×128, whichever rows are read at once, of a weight that ends inside blocks."""
    weight = torch.randn(333, 260, generator=torch.Generator().manual_seed(0))
    value = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((333, 260)))
    value.const_value = ir.tensor(weight.numpy(), name="w")
    for scales, across in (("tensor", 1), ("block", 3)):
        codes, scale = Fp8(fp8_scales=scales).weights(value)
        rows = codes.const_value.open()  # type: ignore[union-attr]
        pieces = torch.cat([rows(begin, min(begin + 50, 333)) for begin in range(0, 333, 50)])
        numbers = scale.const_value.open()(0, 333).view(333, across)  # type: ignore[union-attr]
        wide = numbers.repeat_interleave(128, 1)[:, :260] if across > 1 else numbers
        high, broad = (128, 128) if across > 1 else (333, 260)
        for row, column in itertools.product(range(0, 333, high), range(0, 260, broad)):
            here = slice(row, row + high), slice(column, column + broad)
            assert (wide[here] == weight[here].abs().max() / 448).all()
        assert torch.equal(pieces.float(), (weight / wide).to(torch.float8_e4m3fn).float())
        assert [part.tolist() for part in Fp8(fp8_scales=scales).quantize(weight, "w")[1:]] == [
            numbers.squeeze(1).tolist()
        ]


def in_runs_of_4(weight: torch.Tensor, zero_points: bool) -> list[torch.Tensor]:
    scale, zero = int4_codes.nearest(weight, 4, zero_points)
    return [int4_codes.codes_of(weight, 4, scale, zero), scale, *([zero] if zero_points else [])]


def test_runs_become_4_bits() -> None:
    weight = torch.tensor([[-8.0, 7.0, 0.0, 0.4, 4.0, -3.5, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.25, 0.5, 1.0, -2.0]])
    codes, scale = in_runs_of_4(weight, zero_points=False)
    # The second run is fitted: 4, -3.5 and 3 are -8, 7 and -6 at first, and then multiples of -0.5 exactly.
    assert codes.tolist() == [[0, 15, 8, 8, 0, 15, 2, 8], [8, 8, 8, 8, 9, 10, 12, 0]]
    assert scale.tolist() == [[1.0, -0.5], [0.0, 0.25]]
    codes, scale, zero = in_runs_of_4(torch.tensor([[-1.0, 0.0, 14.0, 3.0, 5.0, 15.0]]), zero_points=True)
    assert (codes.tolist(), scale.tolist(), zero.tolist()) == ([[0, 1, 15, 4, 5, 15]], [[1.0, 1.0]], [[1, 0]])


def test_a_weight_that_is_stored_in_out_becomes_4_bits() -> None:
    """GPT-2 stores weights [in, out], so they are read across; with whole groups nothing is padded, and so copied."""
    stored = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    scale, zero = int4_codes.nearest(stored.t(), 32, True)
    expected = int4_codes.nearest(stored.t().contiguous(), 32, True)
    assert torch.equal(scale, expected[0]) and torch.equal(zero, expected[1])
    codes = int4_codes.codes_of(stored.t(), 32, scale, zero)
    assert torch.equal(codes, int4_codes.codes_of(stored.t().contiguous(), 32, scale, zero))


def test_mxfp4_goes_to_the_even_one_of_two_and_is_clipped() -> None:
    """Groups with an amax of 6 have the power 1; zeros that pad a partial group do not count."""
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weight = torch.tensor([[6.0, *halfway, *(-number for number in halfway), *[0.0] * 17, 7.0, 7.0, 7.0, 1.0]])
    codes, scale = Mxfp4().quantize(weight, "weight")
    assert codes[0, :15].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14]
    # 7 becomes 6 with the power 1, and 8 with 2; then 1 is still 1.
    assert (scale.tolist(), codes[0, 32:].tolist()) == ([[0.5, 0.5]], [7, 7, 7, 2])
    codes, scale = Mxfp4().quantize(torch.full((1, 3), 7.5), "weight")
    assert (scale.tolist(), codes.tolist()) == ([[1.0]], [[6, 6, 6]])


@pytest.mark.parametrize("largest", [0.0, 2.0**-140, 2.0**-126, 3.0 * 2.0**-124, 2.5e38])
def test_mxfp4_of_the_smallest_and_largest_numbers(largest: float) -> None:
    codes, scale = Mxfp4().quantize(torch.tensor([[largest, -largest, 0.0]]), "weight")
    assert scale.float().log2().item() in range(-126, 127), "a normal bfloat16, as the kernels read it"
    error = (Mxfp4().restore(codes, scale)[0, 0].double() - largest).abs()
    assert error <= max(largest / 7, 2.0**-126)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "quantize",
    [
        *(Fp8(fp8_scales=scales).quantize for scales in fp8.SCALES),
        Int4Rtn().quantize,
        Int4Rtn(zero_points=True).quantize,
        Mxfp4().quantize,
    ],
)
def test_what_is_no_number_is_refused(quantize: Callable[[torch.Tensor, str], object], value: float) -> None:
    weight = torch.ones(3, 5)
    weight[1, 2] = value
    with pytest.raises(EngineError, match="o_proj cannot be quantized: it holds NaN or infinity"):
        quantize(weight, "o_proj")


TABLE, WEIGHT, BIAS = (307, 21), (13, 21), (13,)


def small_graph(scale: float) -> tuple[ir.Model, dict[str, Array]]:
    """logits = (rows of a table · scale) weightᵀ + bias, and again times a weight. Sixteenths: sums are exact."""
    random = np.random.default_rng(5)
    shapes = {"table": TABLE, "weight": WEIGHT, "bias": BIAS, "head": (307, 13)}
    arrays = {name: (random.integers(-64, 65, shape) / 16).astype(np.float32) for name, shape in shapes.items()}
    values = {
        name: ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        for name, array in {**arrays, "scale": np.array(scale, np.float32)}.items()
    }
    tokens = ir.Value(name="tokens", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape((1, "T")))
    nodes: list[ir.Node] = []

    def op(op_type: str, inputs: list[ir.Value], width: int, **attributes: int | list[int]) -> ir.Value:
        converted = [ir.convenience.convert_attribute(*item) for item in attributes.items()]
        dims = (inputs[0].shape[1], width) if op_type == "Transpose" and inputs[0].shape else (1, "T", width)
        name = f"{op_type}.{len(nodes)}"
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims))
        nodes.append(ir.Node("", op_type, inputs, converted, outputs=[output], name=name))
        return output

    x = op("Mul", [op("Gather", [values["table"], tokens], 21, axis=0), values["scale"]], 21)
    y = op("MatMul", [x, op("Transpose", [values["weight"]], 13, perm=[1, 0])], 13)
    y = op("Add", [y, values["bias"]], 13)
    logits = op("MatMul", [y, op("Transpose", [values["head"]], 307, perm=[1, 0])], 307)
    logits.name = "logits"
    graph = ir.Graph(
        [tokens], [logits], nodes=nodes, initializers=list(values.values()), opset_imports={"": 24, "enginewright": 1}
    )
    return ir.Model(graph, ir_version=10), arrays


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_quantized_arithmetic_is_numpys(quant: QuantConfig) -> None:
    model, arrays = small_graph(scale=0.75)
    assert Quantize(quant)(model).rewrites == 3
    ops = {
        "bf16": ["EmbedBf16", "GemmBf16", "GemmBf16"],
        "int8-wo": ["EmbedW8", "GemmW8A16", "GemmW8A16"],
        "w8a8": ["EmbedW8", "QuantizeRows", "GemmW8A8", "QuantizeRows", "GemmW8A8"],
        "int4-rtn": ["EmbedW8", "QuantizeRows", "GemmW4A8", "QuantizeRows", "GemmW8A8"],
        "mxfp4": ["EmbedW8", "QuantizeRows", "GemmMxfp4A8", "QuantizeRows", "GemmW8A8"],
        "fp8": ["EmbedW8", "GemmFp8A16", "GemmW8A16"],
    }
    assert [node.op_type for node in model.graph if node.domain] == ops[quant.name]
    tokens = random_tokens(29, seed=1)
    logits = run(model, {"tokens": tokens[None]})["logits"][0]

    def stored(name: str) -> tuple[Array, Array]:
        """Values in fp32, and scales (1 where there are none). A row is one run, where there are runs."""
        values, *scale = numpy_weight(name, torch.from_numpy(arrays[name]), quant)
        if isinstance(quant, Mxfp4) and name not in TABLES:
            numbers = 2 * values.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        else:
            numbers = values.astype(np.float32) - (8 if values.dtype == np.uint8 else 0)
        return numbers, scale[0].astype(np.float32).reshape(-1) if scale else np.ones(len(values), np.float32)

    def rounded(x: Array) -> tuple[Array, Array | np.float32]:
        """Rounds activations; gives values and their scale."""
        if quant.precision(CPU_TARGET).dtype == ir.DataType.BFLOAT16:
            return x.astype(bfloat16).astype(np.float32), np.float32(1)
        largest = np.abs(x).max(axis=1, keepdims=True)
        return np.rint(x * (np.float32(127) / largest)), largest / np.float32(127)

    (table, table_scale), (weight, weight_scale), (head, head_scale) = map(stored, ("table", "weight", "head"))
    x, x_scale = rounded(table[tokens] * table_scale[tokens][:, None] * np.float32(0.75))
    y, y_scale = rounded(((x @ weight.T) * x_scale * weight_scale + arrays["bias"]).astype(np.float32))
    expected = (y @ head.T) * y_scale * head_scale
    # A row's scale makes activations inexact, so that a sum in another order may differ in its last bits.
    assert np.abs(logits - expected).max() <= tolerances.GEMM_F32 * np.abs(expected).max()
    unrounded = (
        ((table[tokens] * table_scale[tokens][:, None] * 0.75) @ weight.T) * weight_scale + arrays["bias"]
    ) @ head.T
    assert np.abs(logits - unrounded * head_scale).max() > 100 * tolerances.GEMM_F32 * np.abs(expected).max()


@pytest.mark.parametrize(("scales", "group"), [("tensor", 0), ("channel", 0), ("block", 128)])
def test_gpus_have_activations_in_fp8(scales: str, group: int) -> None:
    """Activations are FP8 on GPUs except for tables; they are bf16 on the CPU, and where the method wants it."""
    quant = Fp8(fp8_scales=scales)
    for target, other in ((CPU_TARGET, quant), (CudaTarget(), Fp8(fp8_scales=scales, fp8_activations="bf16"))):
        model, _ = small_graph(scale=1.0)
        Quantize(other, target)(model)
        assert [node.op_type for node in model.graph if node.domain] == ["EmbedW8", "GemmFp8A16", "GemmW8A16"]
    model, _ = small_graph(scale=1.0)
    Quantize(quant, CudaTarget())(model)
    nodes = {node.op_type: node for node in model.graph if node.domain}
    assert [*nodes] == ["EmbedW8", "QuantizeRows", "GemmFp8A8", "GemmW8A16"]
    assert nodes["QuantizeRows"].attributes["group"].as_int() == group


def test_layers_of_one_input_share_its_rounding_and_a_tied_table_is_stored_once() -> None:
    model, own = graph_before("llama, biases, tied", "quantize_int8_wo", Int8Wo())
    own(model)
    casts = [node for node in model.graph if node.op_type == "Cast"]
    assert len({node.inputs[0] for node in casts}) == len(casts) == 4 * 3 + 1
    (embed,) = (node for node in model.graph if node.op_type == "EmbedW8")
    head = model.graph.outputs[0].producer()
    assert head is not None and head.op_type == "GemmW8A16"
    assert embed.inputs[1:3] == head.inputs[1:3]
    unfused = dense_graph("llama")
    Quantize(Bf16())(unfused)  # q, k, v of one input, and gate and up
    assert len([node for node in unfused.graph if node.op_type == "Cast"]) == 4 * 3 + 1
