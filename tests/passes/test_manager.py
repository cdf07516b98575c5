"""The pass manager and the whole pipeline: checks, dumped graphs, the golden table, and reads."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from enginewright.builder.tensors import Tensors
from enginewright.builder.weights import Weights
from enginewright.errors import EngineError, UsageError
from enginewright.passes.graph import typed
from enginewright.passes.pass_manager import PassResult, check_graph, run_passes
from enginewright.passes.pipeline import pipeline, run_pipeline
from enginewright.passes.quant import METHODS, Bf16, Int8Wo, QuantConfig, quant_config
from enginewright.passes.quant.int8_wo import quantize_rows
from enginewright.passes.weights import open_rows, read
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.quant_methods import QUANT_METHODS
from tests.checkpoint.test_models import large_checkpoint
from tests.golden.rewrites import TABLE, rewrites
from tests.helpers.breadth import every_third
from tests.helpers.graphs import CASES, QUANTS, checkpoint_of, dense_graph, norm_of_everything
from tests.helpers.tiny import MemoryCheckpoint

SOME_QUANTS = QUANTS[3:4]  # tests/long has the others


def test_rewrites_are_those_of_the_golden_table() -> None:
    check_rewrites(every_third(CASES, METHODS))  # tests/long has all


def check_rewrites(pairs: Sequence[tuple[str, type[QuantConfig]]]) -> None:
    """A method that the table does not have uses the kernels of one that it has, and so has the same rewrites."""
    golden, found = json.loads(TABLE.read_text()), rewrites(pairs)
    hint = "if this is meant: python -m tests.golden.rewrites"
    assert golden.keys() == found.keys(), hint
    for case, by_method in found.items():
        known = {method: without_name(counts, method) for method, counts in golden[case].items()}
        assert known.keys() <= {method.info.name for method in METHODS}, hint
        for method, counts in by_method.items():
            own = without_name(counts, method)
            assert own == known[method] if method in known else own in known.values(), (case, method, hint)


def without_name(counts: Mapping[str, int], method: str) -> dict[str, int]:
    own = f"quantize_{method.replace('-', '_')}"
    return {"quantize" if name == own else name: count for name, count in counts.items()}


@pytest.mark.parametrize("quant", SOME_QUANTS, ids=lambda quant: quant.name)
def test_passes_over_80_layers_read_no_weight(quant: QuantConfig) -> None:
    checkpoint = large_checkpoint(layers=80)  # its tensors cannot be read
    model = _dense(checkpoint)
    _, results = run_pipeline(model, quant)
    assert results["fuse_qkv"].rewrites == 80
    assert checkpoint.reads == []


def _dense(checkpoint: MemoryCheckpoint) -> ir.Model:
    from enginewright.builder.models import build_graph

    return build_graph(checkpoint)


def test_a_weight_is_read_when_it_is_asked_for_and_not_kept() -> None:
    checkpoint = checkpoint_of("llama")
    checkpoint.reads.clear()
    model, _ = run_pipeline(dense_graph("llama"), Int8Wo())
    assert checkpoint.reads == []
    fused = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    weight = model.graph.initializers["model.layers.0.self_attn.qkv_proj.weight"]
    assert weight.const_value is not None
    for reader in (lambda: read(weight), weight.const_value.numpy) * 2:
        checkpoint.reads.clear()
        reader()
        assert checkpoint.reads == fused


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 1, 0, 0, 1, 1)], ids=str)
def test_values_and_scales_come_of_one_reading_in_any_order_the_same(order: tuple[int, ...]) -> None:
    checkpoint = checkpoint_of("llama")
    source = Weights(Tensors(checkpoint)).tensor(
        "model.embed_tokens.weight", checkpoint.tensors["model.embed_tokens.weight"].shape
    )
    outputs = Int8Wo().weights(source)
    expected = quantize_rows(read(source))
    checkpoint.reads.clear()
    for index in order:
        rows, count = open_rows(outputs[index]), len(expected[index])
        pieces = [rows(begin, min(begin + 7, count)) for begin in reversed(range(0, count, 7))]
        assert torch.equal(torch.cat(pieces[::-1]), expected[index])
    if order == (0, 1):
        assert len(checkpoint.reads) == 1


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_graphs_are_dumped_without_weights(quant: QuantConfig, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("gemma3_text")
    checkpoint.reads.clear()
    run_pipeline(dense_graph("gemma3_text"), quant, dump_graphs=tmp_path / "new" / "folder")
    assert checkpoint.reads == []
    files = sorted((tmp_path / "new" / "folder").iterdir())
    names = ["imported", *(each.name for each in pipeline(quant))]
    assert [file.name for file in files] == [f"{index:02d}-{name}.onnx" for index, name in enumerate(names)]
    for file in files:
        assert file.stat().st_size < 60_000
        model = onnx.load(file, load_external_data=False)
        weights = {each.name: each for each in model.graph.initializer}
        (table,) = (each for name, each in weights.items() if name == "model.embed_tokens.weight")
        assert (list(table.dims), table.HasField("raw_data")) == ([307, 72], False)
        for each in weights.values():
            assert each.ByteSize() < 1500
    first, last = (onnx.load(file, load_external_data=False) for file in (files[0], files[-1]))
    assert {node.op_type for node in first.graph.node} >= {"Attention", "WindowAttention", "MatMul"}
    assert {node.op_type for node in last.graph.node} >= {"PagedAttention", "RopeKvWrite"}
    assert "logits" in {value.name for value in last.graph.output}


@dataclass(frozen=True)
class Spoil:
    """A pass that does something wrong."""

    do: Callable[[ir.Model], None]
    name: str = "spoil"

    def __call__(self, model: ir.Model) -> PassResult:
        self.do(model)
        return PassResult(1)


def _too_early(model: ir.Model) -> None:
    node = model.graph.node("layers.1.mlp.gated")
    model.graph.remove(node)
    model.graph.insert_before(model.graph.node("layers.0.attention"), node)


def _gone(model: ir.Model) -> None:
    del model.graph.initializers["model.layers.1.mlp.up_proj.weight"]


def _shapeless(model: ir.Model) -> None:
    model.graph.node("norm").outputs[0].shape = None


def _twice(model: ir.Model) -> None:
    model.graph.node("norm").outputs[0].name = "layers.0.attention"


def _one_name(model: ir.Model) -> None:
    model.graph.inputs[1].name = "tokens"


def _unknown_op(model: ir.Model) -> None:
    model.graph.node("norm").op_type = "RmsNormalization"


def _unknown_plugin(model: ir.Model) -> None:
    model.graph.node("rope").op_type = "RopeTables"


def _missing_attribute(model: ir.Model) -> None:
    del model.graph.node("rope").attributes["scale"]


def _wrong_attribute(model: ir.Model) -> None:
    model.graph.node("rope").attributes["scale"] = ir.AttrInt64("scale", 1)


def _missing_input(model: ir.Model) -> None:
    model.graph.node("rope").replace_input_with(1, None)


def _wrong_shape(model: ir.Model) -> None:
    model.graph.node("rope").outputs[0].shape = ir.Shape((1, "T", 3))


def _wrong_dtype(model: ir.Model) -> None:
    model.graph.node("rope").outputs[1].dtype = ir.DataType.BFLOAT16


def _unwritten_output(model: ir.Model) -> None:
    model.graph.outputs.append(typed("nothing", ir.DataType.FLOAT, (1,)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_too_early, r"layers\.1\.mlp\.gated reads layers\.1\.mlp\.active: which nothing before it writes"),
        (_gone, r"layers\.1\.mlp\.up_proj\.transposed reads model\.layers\.1\.mlp\.up_proj\.weight"),
        (_shapeless, "norm writes norm: whose type or shape is not known"),
        (_twice, r"norm writes layers\.0\.attention: a name that is taken"),
        (_one_name, "two inputs or weights of the graph have one name"),
        (_unknown_op, r"norm has an unknown op \.RmsNormalization"),
        (_unknown_plugin, r"rope has an unknown op enginewright\.RopeTables: known: Activation, AddRmsNorm, "),
        (_missing_attribute, "rope is no RopeTable: its attributes are none, not scale: float"),
        (_wrong_attribute, "rope is no RopeTable: its attributes are scale: int, not scale: float"),
        (_missing_input, "rope is no RopeTable: it lacks inv_freq"),
        (_wrong_shape, r"rope writes FLOAT \[1,T,3\], FLOAT \[1,T,4\]: not FLOAT \[1,T,4\], FLOAT \[1,T,4\]"),
        (_wrong_dtype, r"rope writes FLOAT \[1,T,4\], BFLOAT16 \[1,T,4\]: not"),
        (_unwritten_output, "the graph outputs nothing: which nothing writes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_breaks_the_graph_is_named(spoil: Callable[[ir.Model], None], message: str) -> None:
    with pytest.raises(EngineError, match=rf"(?s)the pass spoil left a broken graph: node.*{message}|spoil.*{message}"):
        run_passes(dense_graph("llama"), [Spoil(spoil)])


def test_every_graph_on_the_way_is_checked_and_whole() -> None:
    model = dense_graph("gemma3_text")
    check_graph(model)
    for each in pipeline(Int8Wo()):
        each(model)
        check_graph(model)
        assert set(model.opset_imports) == {"", "enginewright"}


def test_results_are_by_name_and_add_up() -> None:
    class Twice:
        name = "twice"
        counts = iter((3, 4))

        def __call__(self, model: ir.Model) -> PassResult:
            count = next(self.counts)
            return PassResult(count, (f"No to {count}.",))

    twice = Twice()
    results = run_passes(dense_graph("llama"), [twice, Spoil(lambda model: None), twice])
    assert results == {"twice": PassResult(7, ("No to 3.", "No to 4.")), "spoil": PassResult(1)}


def _cap_the_residual(model: ir.Model) -> None:
    """A node with a kernel, in a place that no model has: nothing to object."""
    norm = model.graph.node("norm")
    source = norm.inputs[0]
    assert source is not None
    node = SOFTCAP.node([source], cap=3.0)
    node.name = node.outputs[0].name = "capped"
    model.graph.insert_before(norm, node)
    norm.replace_input_with(0, node.outputs[0])


def _bias_the_residual(model: ir.Model) -> None:
    """An Add of a constant that is no linear layer's bias."""
    _cap_the_residual(model)
    node = model.graph.node("capped")
    constant = typed("half", ir.DataType.FLOAT, (48,))
    constant.const_value = ir.tensor(np.full(48, 0.5, np.float32), name="half")
    model.graph.register_initializer(constant)
    output = typed("biased", ir.DataType.FLOAT, node.outputs[0].shape.dims if node.outputs[0].shape else ())
    add = ir.Node("", "Add", [node.outputs[0], constant], outputs=[output], name="biased")
    model.graph.insert_after(node, add)
    model.graph.node("norm").replace_input_with(0, output)


def _exponential(model: ir.Model) -> None:
    norm = model.graph.node("norm")
    source = norm.inputs[0]
    assert source is not None and source.shape is not None
    output = typed("grown", ir.DataType.FLOAT, source.shape.dims)
    model.graph.insert_before(norm, ir.Node("", "Exp", [source], outputs=[output], name="grown"))
    norm.replace_input_with(0, output)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_bias_the_residual, r"node biased \(Add\) has no kernel: norm normalizes a sum with a constant\."),
        (_exponential, r"node grown \(Exp\) has no kernel"),
        (norm_of_everything, r"layers\.1\.input_layernorm \(RMSNormalization\) has no kernel.*more than axis -1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_target_runs_is_named(spoil: Callable[[ir.Model], None], message: str) -> None:
    model = dense_graph("llama")
    spoil(model)
    with pytest.raises(EngineError, match=f"(?s){message}"):
        run_pipeline(model, Bf16())


def test_what_has_kernels_may_stand_anywhere() -> None:
    model = dense_graph("llama")
    _cap_the_residual(model)
    run_pipeline(model, Bf16())
    assert "capped" in {node.name for node in model.graph}


@pytest.mark.parametrize("name", ["w8a8", "int4-rtn"])
@pytest.mark.parametrize("size", [16, 48, 544, -32])
def test_group_sizes_that_no_kernel_takes_are_refused(name: str, size: int) -> None:
    with pytest.raises(UsageError, match=f"--group-size {size} is not possible"):
        quant_config(name, group_size=size)


def test_methods_are_found_by_name() -> None:
    assert [method.info.name for method in METHODS] == list(QUANT_METHODS)
    assert quant_config("int8-wo") == Int8Wo()
    with pytest.raises(KeyError):
        quant_config("int8")
