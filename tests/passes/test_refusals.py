"""A pass leaves what it must not rewrite as it was, and gives the reason."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from enginewright.passes.graph import standard, typed
from enginewright.passes.pass_manager import check_graph
from enginewright.plugins.elementwise.softcap import SOFTCAP
from tests import tolerances
from tests.helpers.graphs import DenseRun, graph_before, norm_of_everything, random_tokens, relative_error
from tests.helpers.onnx_run import Array
from tests.helpers.ragged import RaggedRun

Spoil = Callable[[ir.Model], None]


def value(model: ir.Model, name: str) -> ir.Value:
    return next(output for node in model.graph for output in node.outputs if output.name == name)


def give(name: str) -> Spoil:
    """A value in the middle of a pattern is an output of the graph, too."""
    return lambda model: model.graph.outputs.append(value(model, name))


def use(name: str) -> Spoil:
    """A value in the middle of a pattern has a reader outside."""

    def spoil(model: ir.Model) -> None:
        capped = _append(model, SOFTCAP.node([value(model, name)], cap=1.0), f"{name}.read")
        model.graph.outputs.append(capped)

    return spoil


def rewire(node: str, index: int, replacement: str) -> Spoil:
    """Input `index` of a node is another value, or another weight."""

    def spoil(model: ir.Model) -> None:
        changed = model.graph.node(node)
        weight = model.graph.initializers.get(replacement)
        changed.replace_input_with(index, value(model, replacement) if weight is None else weight)

    return spoil


def bypass(name: str, index: int = 0) -> Spoil:
    """Readers of a value read input `index` of the node that writes it."""

    def spoil(model: ir.Model) -> None:
        skipped = value(model, name)
        node = skipped.producer()
        assert node is not None and node.inputs[index] is not None
        ir.convenience.replace_all_uses_with(skipped, node.inputs[index])

    return spoil


def cap(name: str) -> Spoil:
    """Inserts a soft cap after a value."""

    def spoil(model: ir.Model) -> None:
        source = value(model, name)
        readers = source.uses()
        node = SOFTCAP.node([source], cap=3.0)
        for reader, index in tuple(readers):
            if reader is not node:
                reader.replace_input_with(index, node.outputs[0])
        producer = source.producer()
        assert producer is not None
        node.name = node.outputs[0].name = f"{name}.capped"
        model.graph.insert_after(producer, node)

    return spoil


def with_constant(name: str, *dims: int) -> Spoil:
    """The second input of a node is a constant."""

    def spoil(model: ir.Model) -> None:
        tensor = ir.tensor(np.full(dims, 0.5, np.float32), name="half")
        constant = typed("half", ir.DataType.FLOAT, dims)
        constant.const_value = tensor
        model.graph.register_initializer(constant)
        model.graph.node(name).replace_input_with(1, constant)

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(model: ir.Model) -> None:
        for each in spoils:
            each(model)

    return spoil


def add_a_mean(model: ir.Model) -> None:
    """The residual takes one number, the mean of what it took before."""
    add = model.graph.node(f"{MLP}.down_proj.residual")
    mean = typed("mean", ir.DataType.FLOAT, (1, 1, 1))
    model.graph.insert_before(add, standard("ReduceMean", [add.inputs[1]], [mean], "mean", keepdims=1))
    add.replace_input_with(1, mean)


def round_too(name: str) -> Spoil:
    """A value, or an input, is also an output of the graph in bfloat16."""

    def spoil(model: ir.Model) -> None:
        source = next((each for each in model.graph.inputs if each.name == name), None) or value(model, name)
        assert source.shape is not None
        low = typed("low", ir.DataType.BFLOAT16, source.shape.dims)
        model.graph.append(standard("Cast", [source], [low], "low", to=ir.DataType.BFLOAT16.value))
        model.graph.outputs.append(low)

    return spoil


def square(model: ir.Model) -> None:
    """A product of two values that are no weights: activations against themselves."""
    x = value(model, "norm")
    assert x.shape is not None
    one, tokens, width = x.shape.dims
    across = typed("across", ir.DataType.FLOAT, (one, width, tokens))
    product = typed("gram", ir.DataType.FLOAT, (one, tokens, tokens))
    turn = ir.Node("", "Transpose", [x], [ir.AttrInt64s("perm", [0, 2, 1])], outputs=[across], name="across")
    model.graph.extend([turn, standard("MatMul", [x, across], [product], "gram")])
    model.graph.outputs.append(product)


def _append(model: ir.Model, node: ir.Node, name: str) -> ir.Value:
    node.name = node.outputs[0].name = name
    model.graph.append(node)
    return node.outputs[0]


Q, K, V = (f"layers.1.self_attn.{part}_proj" for part in "qkv")
MLP = "layers.1.mlp"
# Pass, case, what is done to the graph, the sentence.
REFUSALS: list[tuple[str, str, Spoil, str]] = [
    ("fuse_qkv", "qwen2", bypass(K), f"Only some of {Q} and {K}.product and {V} have a bias."),
    ("fuse_qkv", "qwen2", rewire(f"{K}.transposed", 0, f"model.{V}.weight"), f"{Q} and {K} and {V} share a weight."),
    ("fuse_qkv", "llama", rewire(V, 0, "layers.0.input_layernorm"), f"{Q} and {K} and {V} have different inputs."),
    ("fuse_qkv", "llama", use(f"{Q}.transposed"), f"The product or the weight of {Q} is used elsewhere, too."),
    ("fuse_qkv", "llama", give(V), f"The product or the weight of {V} is used elsewhere, too."),
    ("fuse_qkv", "qwen2", give(f"{V}.product"), "layers.1.attention does not attend to three linear layers."),
    ("fuse_qkv", "qwen2", use(f"{V}.product"), "layers.1.attention does not attend to three linear layers."),
    ("fuse_qkv", "llama", cap(K), "layers.1.attention does not attend to three linear layers."),
    ("fuse_qkv", "gemma3_text", cap(Q), "layers.1.attention does not attend to three linear layers."),
    ("fuse_gate_up", "llama", cap(f"{MLP}.up_proj"), f"{MLP}.gated does not multiply two linear layers."),
    (
        "fuse_gate_up",
        "llama, biases, tied",
        bypass(f"{MLP}.up_proj"),
        f"Only some of {MLP}.gate_proj and {MLP}.up_proj.product have a bias.",
    ),
    (
        "fuse_gate_up",
        "gemma3_text",
        rewire(f"{MLP}.up_proj.transposed", 0, f"model.{MLP}.gate_proj.weight"),
        f"{MLP}.gate_proj and {MLP}.up_proj share a weight.",
    ),
    (
        "fuse_residual_norm",
        "llama",
        with_constant(f"{MLP}.down_proj.residual", 48),
        "layers.2.input_layernorm normalizes a sum with a constant.",
    ),
    (
        "fuse_residual_norm",
        "llama",
        norm_of_everything,
        "layers.1.input_layernorm normalizes over more than axis -1.",
    ),
    ("fuse_residual_norm", "llama", add_a_mean, "layers.2.input_layernorm normalizes a sum of different shapes."),
    ("quantize_bf16", "llama", square, "gram does not multiply with a weight."),
    (
        "fuse_swiglu",
        "llama",
        give(f"{MLP}.gate_proj"),
        f"A value between {MLP}.gate_up_proj and {MLP}.gated is used elsewhere, too.",
    ),
    (
        "fuse_swiglu",
        "gemma3_text",
        use(f"{MLP}.active"),
        f"A value between {MLP}.gate_up_proj and {MLP}.gated is used elsewhere, too.",
    ),
    (
        "fuse_swiglu",
        "gemma3_text",
        both(rewire(f"{MLP}.active", 0, f"{MLP}.up_proj"), rewire(f"{MLP}.gated", 1, f"{MLP}.gate_proj")),
        f"{MLP}.gated reads other columns than the gate and the up of {MLP}.gate_up_proj.",
    ),
    (
        "fuse_rope_kv_write",
        "gemma3_text",
        rewire("layers.1.self_attn.k_norm.joined.rotated", 1, "rope.local.cos"),
        "layers.1.attention rotates queries and keys by different angles.",
    ),
    (
        "fuse_rope_kv_write",
        "llama",
        use(f"{K}.rotated"),
        "A rotated value of layers.1.attention is used elsewhere, too.",
    ),
    ("round_in_producer", "llama", use("layers.1.input_layernorm"), "layers.1.input_layernorm is used unrounded, too."),
    ("round_in_producer", "llama", give("layers.1.attention"), "layers.1.attention is used unrounded, too."),
    ("round_in_producer", "llama", round_too("rope.cos"), "rope.cos is used unrounded, too."),
    ("round_in_producer", "llama", round_too("positions"), "low rounds an input of the graph."),
    ("round_in_producer", "llama", cap("layers.1.attention"), "layers.1.attention.capped (Softcap) cannot round."),
]


def results(model: ir.Model) -> list[Array]:
    """All outputs for some tokens, of a dense graph or a ragged one."""
    tokens = random_tokens(9, seed=2)
    if any(each.name == "logit_rows" for each in model.graph.inputs):
        ragged = RaggedRun(model, num_blocks=4)
        ragged.step({"a": tokens[:6], "b": tokens[6:]})
        return [each.astype(np.float32) for each in ragged.outputs.values()]
    dense = DenseRun(model)
    return [dense.step(tokens), *dense.past.values()]


@pytest.mark.parametrize(
    ("name", "case", "spoil", "sentence"), REFUSALS, ids=[f"{name}-{sentence}" for name, _, _, sentence in REFUSALS]
)
def test_a_refusal_says_why_and_changes_nothing(name: str, case: str, spoil: Spoil, sentence: str) -> None:
    untouched, own = graph_before(case, name)
    whole = own(untouched).rewrites
    model, own = graph_before(case, name)
    spoil(model)
    check_graph(model)
    before = results(model)
    result = own(model)
    assert sentence in result.refusals
    assert len(set(result.refusals)) == len(result.refusals)
    assert 0 < result.rewrites <= whole
    check_graph(model)
    for one, other in zip(before, results(model), strict=True):
        if name.startswith("quantize"):
            assert relative_error(other, one) < tolerances.ENGINE_LOGITS["bf16"]
        else:
            assert np.abs(other - one).max() < tolerances.DENSE_LOGITS
