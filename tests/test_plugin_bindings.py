"""How ops become kernel calls: each has a kernel for each family of targets, and bindings say what the ops are."""

from collections.abc import Callable, Mapping

import onnx_ir as ir
import pytest

from enginewright import _cpu
from enginewright.errors import EngineError
from enginewright.plugins import PLUGINS, Plugin, binding_of
from enginewright.plugins.registry import STANDARD_KERNELS
from tests.test_plugins import FIRST

BOUND = {name: plugin for name, plugin in PLUGINS.items() if plugin.kernels}


@pytest.mark.parametrize("isa", _cpu.isa_names())
def test_every_kernel_that_an_op_names_is_there_and_serves_an_op(isa: str) -> None:
    named = {plugin.kernels["cpu"].kernel for plugin in BOUND.values() if "cpu" in plugin.kernels}
    named |= {binding.kernel for binding in STANDARD_KERNELS["cpu"].values()}
    assert named == set(_cpu.kernel_names(isa))


def test_ops_without_a_kernel_are_those_that_a_pass_replaces() -> None:
    assert set(PLUGINS) - set(BOUND) == {"CausalWindow", "KvWrite", "Rope"}
    for name in ("CausalWindow", "KvWrite", "Rope"):
        with pytest.raises(EngineError, match=rf"node it \({name}\) has no kernel for cpu"):
            binding_of(FIRST[name].node(), "cpu")
    with pytest.raises(EngineError, match=r"node it \(Exp\) has no kernel for cpu"):
        binding_of(ir.Node("", "Exp", [], name="it"), "cpu")


@pytest.mark.parametrize(
    ("plugin", "family"),
    [(plugin, family) for plugin in BOUND.values() for family in plugin.kernels],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_binding_speaks_of_the_op_it_stands_at(plugin: Plugin, family: str) -> None:
    node = FIRST[plugin.name].node()
    binding = binding_of(node, family)
    assert binding is plugin.kernels[family]
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
    if binding.scratch is not None:
        name, _, columns = binding.scratch(node)
        assert name not in operands
        if family == "cpu":  # of attention alone
            assert columns == 6 * (32 + 16)  # head_dim 10 padded, and the state of each head


def test_standard_ops_are_bound_too() -> None:
    signatures: Mapping[str, Callable[[], ir.Node]] = {
        "Add": lambda: ir.Node("", "Add", [None, None], name="it"),
        "Cast": lambda: ir.Node("", "Cast", [None], name="it"),
        "Gather": lambda: ir.Node("", "Gather", [None, None], name="it"),
        "RMSNormalization": lambda: ir.Node("", "RMSNormalization", [None, None], name="it"),
    }
    assert set(signatures) == set(STANDARD_KERNELS["cpu"])
    for make in signatures.values():
        node = make()
        assert len(binding_of(node, "cpu").inputs) == len(node.inputs)
