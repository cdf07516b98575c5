"""Recognizes act(gate) · up, as models write it."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import made_by


@dataclass(frozen=True)
class GatedProduct:
    """A product act(gate) · up of a graph."""

    epilogue: str  # name of the GEMM epilogue that computes it
    gate: ir.Value  # input of the activation
    up: ir.Value  # the other factor
    nodes: tuple[ir.Node, ...]  # nodes of the activation and the product, in order


def gated_product(product: ir.Node) -> GatedProduct | None:
    """Finds the gated product that ends in a Mul: Mul(Mul(gate, Sigmoid(gate)), up) or Mul(Gelu(gate), up)."""
    active, up = product.inputs
    assert active is not None and up is not None
    gelu = made_by(active, "Gelu")
    if gelu is not None and gelu.attributes.get_string("approximate", "none") == "tanh":
        gate = gelu.inputs[0]
        assert gate is not None
        return GatedProduct("geglu", gate, up, (gelu, product))
    silu = made_by(active, "Mul")
    if silu is None:
        return None
    gate, sigmoid = silu.inputs[0], made_by(silu.inputs[1], "Sigmoid")
    if gate is None or sigmoid is None or sigmoid.inputs[0] is not gate:
        return None
    return GatedProduct("swiglu", gate, up, (sigmoid, silu, product))
