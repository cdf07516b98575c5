"""The pass that applies a quantization method: it takes up every linear layer and every embedding."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.errors import UsageError
from enginewright.passes.graph import head_of, linear_of, nodes_of, only_used_by, replace, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import QuantConfig, stored
from enginewright.passes.weights import RowsTensor, read
from enginewright.plugins.plugin import CODES
from enginewright.plugins.quantize_rows import QUANTIZE_ROWS
from enginewright.plugins.target import CPU_TARGET, Target


@dataclass(frozen=True)
class Quantize:
    """Applies a method to a dense graph, for a target."""

    config: QuantConfig
    target: Target = CPU_TARGET

    @property
    def name(self) -> str:
        return f"quantize_{self.config.name.replace('-', '_')}"

    def __call__(self, model: ir.Model) -> PassResult:
        run = _Run(model, self.config, self.target)
        for node in nodes_of(model, "MatMul"):
            run.linear(node)
        for node in nodes_of(model, "Gather"):
            run.embedding(node)
        run.swap_initializers()
        return PassResult(run.rewrites, tuple(run.refusals))


def table_methods(model: ir.Model, config: QuantConfig) -> dict[ir.Value, QuantConfig]:
    """The methods of weights with a row for each token: of embeddings and the head.

    Raises:
        UsageError: the head is to have one of its own, and shares its table with an embedding.
    """
    tables = [gather.inputs[0] for gather in nodes_of(model, "Gather")]
    methods = {table: config.tables for table in tables if table is not None and table.is_initializer()}
    head = head_of(model).weight
    if head in methods and config.head != config.tables:
        raise UsageError(
            "--quantize-lm-head is not possible",
            "the head shares its table with the embedding, and that is int8 by row",
            "Leave it out.",
        )
    return methods if head in methods else {**methods, head: config.head}


class _Run:
    def __init__(self, model: ir.Model, config: QuantConfig, target: Target) -> None:
        self.model, self.config, self.target = model, config, target
        self.rewrites = 0
        self.refusals: list[str] = []
        self._tables = table_methods(model, config)
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
        del transpose  # another layer may share it (a tied head); cleanup removes it when nobody does

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
        """Quantized weights take the names of what they stand for."""
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
            already = stored(weight)
            parts = [_alike(part) for part in already.parts] if already else self._method(weight).weights(weight)
            self._weights[weight] = parts
        return self._weights[weight]

    def _method(self, weight: ir.Value) -> QuantConfig:
        already = stored(weight)
        return already.stored_as if already else self._tables.get(weight, self.config)

    def _round(self, x: ir.Value, method: QuantConfig) -> tuple[Sequence[ir.Value], list[ir.Node]]:
        """x in the precision of activations; layers with one input share it."""
        (to, group), largest = method.precision(self.target), method.activation_largest(self.target)
        if (x, to, group, largest) in self._rounded:
            return self._rounded[x, to, group, largest], []
        if to in CODES:
            given = [self._vector(f"{x.name}.largest", largest)] if largest else []
            node = QUANTIZE_ROWS.node([x, *given], to=int(to), group=group)
            node.name = f"{x.name}.quantized"
            for output, name in zip(node.outputs, (node.name, f"{node.name}.scale"), strict=True):
                output.name = name
        else:
            assert x.shape is not None
            rounded = typed(f"{x.name}.rounded", to, x.shape.dims)
            node = standard("Cast", [x], [rounded], str(rounded.name), to=int(to))
        self._rounded[x, to, group, largest] = node.outputs
        return node.outputs, [node]

    def _vector(self, name: str, numbers: Sequence[float]) -> ir.Value:
        values = torch.tensor(numbers)
        vector = RowsTensor(name, torch.float32, tuple(values.shape), lambda: lambda begin, end: values[begin:end])
        value = vector.initializer()
        self.model.graph.register_initializer(value)
        return value


def _alike(part: ir.Value) -> ir.Value:
    """For this graph: there is one for each target, and a value belongs to one graph."""
    return ir.Value(name=part.name, type=part.type, shape=part.shape, const_value=part.const_value)
