"""Applies a quantization method to every linear layer and every embedding."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.errors import UsageError
from enginewright.passes.graph import head_of, linear_of, nodes_of, only_used_by, replace, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.bf16 import Bf16
from enginewright.passes.quant.method import QuantConfig, stored
from enginewright.passes.weights import RowsTensor, read
from enginewright.plugins import DOMAIN, plugin_of
from enginewright.plugins.experts.grouped_linear import GROUPED_LINEAR, STARTS
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.gemm.head_gemm import HEAD_GEMM
from enginewright.plugins.gemm.quantize_rows import QUANTIZE_ROWS
from enginewright.plugins.plugin import CODES, operand
from enginewright.plugins.target import CPU_TARGET, Target

BF16 = Bf16()


@dataclass(frozen=True)
class Quantize:
    """Replaces linear layers and embeddings of a dense graph by the kernels' ops, for a target."""

    config: QuantConfig  # the method
    target: Target = CPU_TARGET  # target, which decides the precision of activations

    @property
    def name(self) -> str:
        """Name of the pass."""
        return f"quantize_{self.config.name.replace('-', '_')}"

    def __call__(self, model: ir.Model) -> PassResult:
        run = _Run(model, self.config, self.target)
        for node in nodes_of(model, "MatMul"):
            run.linear(node)
        for node in nodes_of(model, "HeadLinear", domain=DOMAIN):
            run.by_head(node)
        for node in nodes_of(model, GROUPED_LINEAR.name, domain=DOMAIN):
            run.experts(node)
        for node in nodes_of(model, ROUTE.name, domain=DOMAIN):
            run.router(node)
        for node in nodes_of(model, "Gather"):
            run.embedding(node)
        run.swap_initializers()
        return PassResult(run.rewrites, tuple(run.refusals))


def table_methods(model: ir.Model, config: QuantConfig) -> dict[ir.Value, QuantConfig]:
    """Chooses the methods of weights with a row for each token: embeddings and the head.

    Args:
        model: the dense graph.
        config: the method of the build.

    Returns:
        Weight → method.

    Raises:
        UsageError: the head should have a method of its own, but shares its table with an embedding.
    """
    tables = [gather.inputs[0] for gather in nodes_of(model, "Gather")]
    methods = {table: config.tables for table in tables if table is not None and table.is_initializer()}
    head = head_of(model)
    if head is None:
        return methods
    if head.weight in methods and config.head != config.tables:
        raise UsageError(
            "--quantize-lm-head is not possible",
            "the head shares its table with the embedding, and that is int8 by row",
            "Leave it out.",
        )
    return methods if head.weight in methods else {**methods, head.weight: config.head}


class _Run:
    def __init__(self, model: ir.Model, config: QuantConfig, target: Target) -> None:
        self.model, self.config, self.target = model, config, target
        self.rewrites = 0
        self.refusals: list[str] = []
        self._methods = table_methods(model, config)  # methods of weights that do not have `config`
        self._weights: dict[ir.Value, Sequence[ir.Value]] = {}
        self._rounded: dict[tuple[object, ...], Sequence[ir.Value]] = {}

    def linear(self, matmul: ir.Node) -> None:
        product = matmul.outputs[0]
        add = next((user for user in product.consumers() if user.op_type == "Add"), None)
        found = (linear_of(add.outputs[0]) if add is not None else None) or linear_of(product)
        if found is None:
            self.refusals.append(f"{matmul.name} does not multiply with a weight.")
            return
        method = self._method(found.weight)
        x, rounding = self._round(found.x, method)
        gemm = method.gemm(x, self._quantized(found.weight), found.bias)
        gemm.name = found.output.name
        transpose, *own = found.nodes
        replace(own, [*rounding, gemm], [(found.output, gemm.outputs[0])])
        self.rewrites += 1
        del transpose  # another layer may share it (a tied head); cleanup removes it if none does

    def by_head(self, node: ir.Node) -> None:
        """Keeps heads' own weights in bfloat16, whatever the method: they are few."""
        x, weight = node.inputs
        assert x is not None and weight is not None
        self._methods[weight] = BF16
        (rounded,), rounding = self._round(x, BF16)
        gemm = HEAD_GEMM.node(
            [rounded, *self._quantized(weight)], heads=node.attributes["heads"].as_int(), to=int(ir.DataType.FLOAT)
        )
        gemm.name = node.name
        replace([node], [*rounding, gemm], [(node.outputs[0], gemm.outputs[0])])
        self.rewrites += 1

    def experts(self, node: ir.Node) -> None:
        found = linear_of(node.outputs[0])
        assert found is not None
        method = self._method(found.weight)
        x, rounding = self._round(found.x, method)
        one = method.gemm(x, self._quantized(found.weight), found.bias)
        plugin = plugin_of(one)
        assert plugin is not None
        inputs = [*one.inputs, *[None] * (len(plugin.inputs) - 1 - len(one.inputs)), operand(node, STARTS)]
        attributes = {name: attribute.value for name, attribute in one.attributes.items()}
        gemm = plugin.node(inputs, **{**attributes, "epilogue": node.attributes["epilogue"].as_string()})
        gemm.name = node.name
        for index in range(len(one.inputs)):  # detaches the node, which is discarded
            one.replace_input_with(index, None)
        replace([node], [*rounding, gemm], [(found.output, gemm.outputs[0])])
        self.rewrites += 1

    def router(self, node: ir.Node) -> None:
        """Keeps routers in bfloat16, whatever the method of the experts."""
        weight = operand(node, 1)
        if weight not in self._weights:
            self._weights[weight] = Bf16().weights(weight)
        node.replace_input_with(1, self._weights[weight][0])

    def embedding(self, gather: ir.Node) -> None:
        table, tokens = gather.inputs
        if table is None or tokens is None or not table.is_initializer():
            return
        scale, old = 1.0, [gather]
        (output,) = gather.outputs
        multiply = next((user for user in output.consumers() if user.op_type == "Mul"), None)
        if multiply is not None and only_used_by(output, multiply):
            factor = multiply.inputs[1]
            if factor is not None and factor.is_initializer() and factor.shape == ():
                scale, old, output = float(read(factor)), [gather, multiply], multiply.outputs[0]
        embed = self._method(table).embed(tokens, self._quantized(table), scale)
        embed.name = gather.name
        replace(old, [embed], [(output, embed.outputs[0])])
        self.rewrites += 1

    def swap_initializers(self) -> None:
        """Replaces weights by their quantized parts, which take over their names."""
        initializers = self.model.graph.initializers
        for old, new in self._weights.items():
            assert old.name is not None
            del initializers[old.name]
            for value in new:
                self.model.graph.register_initializer(value)
        # Transposes whose products are gone still hold the old values.
        for node in nodes_of(self.model, "Transpose"):
            if node.inputs[0] in self._weights:
                if node.outputs[0].uses():
                    raise AssertionError(f"{node.name} is still used")
                self.model.graph.remove(node, safe=True)

    def _quantized(self, weight: ir.Value) -> Sequence[ir.Value]:
        if weight not in self._weights:
            existing = stored(weight)
            parts = [_copy(part) for part in existing.parts] if existing else self._method(weight).weights(weight)
            self._weights[weight] = parts
        return self._weights[weight]

    def _method(self, weight: ir.Value) -> QuantConfig:
        existing = stored(weight)
        return existing.stored_as if existing else self._methods.get(weight, self.config)

    def _round(self, x: ir.Value, method: QuantConfig) -> tuple[Sequence[ir.Value], list[ir.Node]]:
        """Rounds x to the precision of activations, once for all layers that read it."""
        (to, group), amax = method.precision(self.target), method.activation_amax(self.target)
        if (x, to, group, amax) in self._rounded:
            return self._rounded[x, to, group, amax], []
        if to in CODES:
            given = [self._vector(f"{x.name}.largest", amax)] if amax else []
            node = QUANTIZE_ROWS.node([x, *given], to=int(to), group=group)
            node.name = f"{x.name}.quantized"
            for output, name in zip(node.outputs, (node.name, f"{node.name}.scale"), strict=True):
                output.name = name
        else:
            assert x.shape is not None
            rounded = typed(f"{x.name}.rounded", to, x.shape.dims)
            node = standard("Cast", [x], [rounded], str(rounded.name), to=int(to))
        self._rounded[x, to, group, amax] = node.outputs
        return node.outputs, [node]

    def _vector(self, name: str, numbers: Sequence[float]) -> ir.Value:
        values = torch.tensor(numbers)
        vector = RowsTensor(name, torch.float32, tuple(values.shape), lambda: lambda begin, end: values[begin:end])
        value = vector.initializer()
        self.model.graph.register_initializer(value)
        return value


def _copy(part: ir.Value) -> ir.Value:
    """Copies a value, which belongs to one graph, for the graph of another target."""
    return ir.Value(name=part.name, type=part.type, shape=part.shape, const_value=part.const_value)
