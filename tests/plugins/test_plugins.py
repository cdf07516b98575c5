"""Every op of ours: what it says of its outputs is what onnxruntime gives, and what does not fit is refused."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from enginewright import _cpu
from enginewright.adapter_plan import GROUP_KERNEL, HEAD_KERNEL, KERNEL, TABLE_KERNEL
from enginewright.errors import EngineError
from enginewright.plan import Linear
from enginewright.plugins import DOMAIN, PLUGINS, Plugin, binding_of, expand_references, plugin_of
from enginewright.plugins.kernel import Call, Matrix
from enginewright.plugins.registry import STANDARD_OPS
from enginewright.plugins.target import CPU_TARGET, CudaTarget, Target
from tests.helpers.onnx_run import run
from tests.helpers.plugin_cases import (
    BFLOAT16,
    CASES,
    FIRST,
    FLOAT,
    INDICES,
    INDICES_OF_ONE,
    INT8,
    ONE,
    SIZES,
    Case,
    feed,
    model_of,
    name_of,
)


@pytest.mark.parametrize(("sizes", "indices"), [(SIZES, INDICES), (ONE, INDICES_OF_ONE)], ids=["some", "one"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_an_op_says_is_what_onnxruntime_gives(
    case: Case, sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]
) -> None:
    node = case.node()
    inferred = case.plugin.infer(node)
    assert inferred == [(value.dtype, value.shape.dims) for value in node.outputs if value.shape is not None]
    feeds = {name: feed(name, operand, sizes, indices) for name, operand in case.operands.items()}
    actual = [*run(model_of(node), feeds).values()]
    assert len(actual) == len(inferred) == len(node.outputs)
    for array, (dtype, dims) in zip(actual, inferred, strict=True):
        assert array.dtype == dtype.numpy()
        assert array.shape == tuple(dim if isinstance(dim, int) else sizes[str(dim)] for dim in dims)
        assert np.isfinite(array.astype(np.float32)).all()
        alike = "largest" in case.operands or case.op == "SortRows"  # scales that are given, copies of one row
        assert len(np.unique(array)) > 1 or array.size == 1 or alike


def test_every_op_is_run() -> None:
    assert set(FIRST) == set(PLUGINS)
    assert all(name == plugin.name for name, plugin in PLUGINS.items())


def test_every_file_with_an_op_has_its_line_in_the_registry() -> None:
    folder = Path(__file__).resolve().parents[2] / "plugins"
    defined = {
        path.stem: names
        for path in folder.rglob("*.py")
        if (names := re.findall(r'^[A-Z0-9_]+ = Plugin\(\s+name="(\w+)"', path.read_text(), re.MULTILINE))
    }
    assert sorted(name for names in defined.values() for name in names) == sorted(PLUGINS)
    for stem, names in defined.items():
        assert [name.lower() for name in names] == [stem.replace("_", "")]


def _wrong(plugin: Plugin, good: Case) -> list[tuple[str, ir.Node]]:
    """Nodes that do not fit the schema, each with the reason to give."""
    attributes, count, written = good.attributes, len(plugin.inputs), len(good.node().outputs)

    def node(
        changed: Mapping[str, int | float | str], outputs: int = 0, without: int | None = None, surplus: bool = False
    ) -> ir.Node:
        inputs = good.inputs()
        inputs += [None] * (count - len(inputs))
        if without is not None:
            inputs[without] = None
        if surplus:
            inputs.append(inputs[0])
        converted = [ir.convenience.convert_attribute(*item) for item in changed.items()]
        return ir.Node(DOMAIN, plugin.name, inputs, converted, num_outputs=written + outputs, name="it")

    wrong = [
        (f"it has {count + 1} inputs, not {count}", node(attributes, surplus=True)),
        (f"it has {written + 1} outputs, not {written}", node(attributes, outputs=1)),
        ("its attributes are .*surplus: int.*, not ", node({**attributes, "surplus": 1})),
    ]
    for index, name in enumerate(plugin.inputs):
        if not name.endswith("?"):
            wrong.append((f"it lacks {name}$", node(attributes, without=index)))
    for name, kind in plugin.attributes.items():
        others = {key: value for key, value in attributes.items() if key != name}
        other: int | float = 1 if kind is not int else 1.0
        wrong.append((rf"its attributes are .*, not .*\b{name}: {kind.__name__}", node(others)))
        wrong.append((f"its attributes are .*{name}: {type(other).__name__}", node({**others, name: other})))
    return wrong


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=lambda plugin: plugin.name)
def test_a_node_that_does_not_fit_its_schema_is_named(plugin: Plugin) -> None:
    good = FIRST[plugin.name]
    plugin.check(good.node())
    for reason, node in _wrong(plugin, good):
        with pytest.raises(EngineError, match=f"(?s)node it is no {plugin.name}: {reason}"):
            plugin.check(node)
        with pytest.raises(EngineError, match="node it is no"):
            expand_references(model_of(node))


def test_an_optional_input_may_be_absent_in_both_ways() -> None:
    without = next(case for case in CASES if case.op == "GemmBf16" and case.operands.keys() == {"x", "weight"})
    for inputs in (without.inputs(), [*without.inputs(), None]):
        without.plugin.node(inputs, **without.attributes)


def test_a_scale_stands_next_to_int8_alone() -> None:
    case = FIRST["RmsNorm"]
    for to, others in ((FLOAT, []), (BFLOAT16, []), (INT8, [FLOAT])):
        node = case.plugin.node(case.inputs(), **{**case.attributes, "to": int(to)})
        assert [value.dtype for value in node.outputs] == [to, *others]
        node.attributes.add(ir.AttrInt64("to", int(FLOAT if to == INT8 else INT8)))
        with pytest.raises(EngineError, match=f"it has {len(others) + 1} outputs, not {2 - len(others)}"):
            case.plugin.check(node)


def test_an_op_that_we_do_not_have_is_named() -> None:
    with pytest.raises(EngineError, match=r"node it has an unknown op enginewright\.Gemm: known: Activation, "):
        plugin_of(ir.Node(DOMAIN, "Gemm", [], name="it"))
    assert plugin_of(ir.Node("", "Gemm", [], name="it")) is None


def test_expanding_gives_a_copy_in_standard_ops_and_leaves_the_graph() -> None:
    model = model_of(FIRST["Softcap"].node())
    expanded = expand_references(model)
    assert [node.op_type for node in model.graph] == ["Softcap"]
    assert {node.domain for node in expanded.graph} == {""}
    assert set(expanded.graph.opset_imports) == {""}
    assert [value.name for value in expanded.graph.outputs] == ["out.0"]


TARGETS = (CPU_TARGET, CudaTarget())
BOUND = {name: plugin for name, plugin in PLUGINS.items() if plugin.kernels}


@pytest.mark.parametrize("isa", _cpu.isa_names())
def test_every_kernel_that_an_op_names_is_there_and_serves_an_op(isa: str) -> None:
    named = {plugin.kernels["cpu"].kernel for plugin in BOUND.values() if "cpu" in plugin.kernels}
    named |= {op.kernels["cpu"].kernel for op in STANDARD_OPS.values() if op.view is None}
    assert named | {KERNEL, HEAD_KERNEL, GROUP_KERNEL, TABLE_KERNEL} == set(_cpu.kernel_names(isa))


def test_ops_without_a_kernel_are_those_that_a_pass_replaces() -> None:
    replaced = {"WindowAttention", "GroupedLinear", "HeadLinear", "KvWrite", "LatentAttention", "Pool"}
    assert set(PLUGINS) - set(BOUND) == replaced
    for name in replaced:
        with pytest.raises(EngineError, match=rf"node it \({name}\) has no kernel for cpu"):
            binding_of(FIRST[name].node(), CPU_TARGET)
    with pytest.raises(EngineError, match=r"node it \(Exp\) has no kernel for cpu"):
        binding_of(ir.Node("", "Exp", [], name="it"), CPU_TARGET)


@pytest.mark.parametrize(
    ("plugin", "target"),
    [(plugin, target) for plugin in BOUND.values() for target in TARGETS if target.name in plugin.kernels],
    ids=lambda value: value.name,
)
def test_a_binding_speaks_of_the_op_it_stands_at(plugin: Plugin, target: Target) -> None:
    node = FIRST[plugin.name].node()
    binding = binding_of(node, target)
    assert binding is plugin.kernels[target.name]
    assert len(binding.inputs) == len(plugin.inputs)
    assert len(binding.outputs) == len(plugin.outputs)
    operands = [name for name in (*binding.inputs, *binding.outputs) if name]
    assert len(set(operands)) == len(operands)
    # The dtype of an output, the size of a block and what a pool holds are known from the operands.
    assert set(plugin.attributes) - set(binding.attributes) <= {"to", "block_size", "stored", "queries"}
    assert set(binding.attributes) <= set(plugin.attributes)
    for output, index in binding.in_place.items():
        before, after = node.inputs[index], node.outputs[binding.outputs.index(output)]
        assert before is not None and before.shape == after.shape
    if binding.scratch is not None and target is CPU_TARGET:
        attributes = {name: node.attributes[name].value for name in binding.attributes}
        matrices = {"x": Matrix("f32", Linear(7), 11, 64, 11), "weight": Matrix("bf16", Linear(12), 11, 11, 11)}
        name, _, columns = binding.scratch(Call(matrices, attributes))
        assert name not in operands
        # Of attention each head's columns, padded, and its state; of routing scores of 12 experts.
        assert columns == (16 if plugin.name == "Route" else node.attributes["heads"].as_int() * (32 + 16))


def test_standard_ops_are_bound_too() -> None:
    signatures: Mapping[str, Callable[[], ir.Node]] = {
        "Add": lambda: ir.Node("", "Add", [None, None], name="it"),
        "Cast": lambda: ir.Node("", "Cast", [None], name="it"),
        "Gather": lambda: ir.Node("", "Gather", [None, None], name="it"),
        "RMSNormalization": lambda: ir.Node("", "RMSNormalization", [None, None], name="it"),
    }
    assert set(signatures) == {name for name, op in STANDARD_OPS.items() if op.view is None}
    for make in signatures.values():
        node = make()
        bound = [name for name in binding_of(node, CPU_TARGET).inputs if name != "largest"]  # which INT8 alone has
        assert len(bound) == len(node.inputs)
