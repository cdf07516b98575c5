"""Fuses an attention's projections to queries, keys and values, and to its output's gate, into one matrix product."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.fusion.siblings import stack
from enginewright.passes.graph import LinearLayer, linear_of, nodes_of
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN

# Ops between a projection and attention: rotary embedding, a norm by head between two reshapes, a factor.
BETWEEN = ("RotaryEmbedding", "Reshape", "RMSNormalization", "PositionScale")


@dataclass(frozen=True)
class FuseQkv:
    """Stacks the projections of every attention."""

    name: str = "fuse_qkv"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        attentions = (*nodes_of(model, "Attention"), *nodes_of(model, "WindowAttention", domain=DOMAIN))
        for node in attentions:
            found = [linear_of(_projection(value)) for value in node.inputs[:3]]
            # Keys and values may come from the same product.
            siblings = list({linear.output: linear for linear in found if linear is not None}.values())
            if None in found:
                refusal: str | None = f"{node.name} does not attend to three linear layers."
            else:
                refusal = stack([*siblings, *_gates(node, siblings[0].x)], "qkv_proj")
            rewrites += refusal is None
            refusals += [refusal] if refusal else []
        return PassResult(rewrites, tuple(refusals))


def _gates(attention: ir.Node, x: ir.Value) -> list[LinearLayer]:
    """Finds linear layers of x that gate the attention's output."""
    users = [user for user in attention.outputs[0].consumers() if user.op_type == "Activation"]
    gates = [linear_of(user.inputs[1]) for user in users if len(user.inputs) > 1]
    return [gate for gate in gates if gate is not None and gate.x is x]


def _projection(value: ir.Value | None) -> ir.Value | None:
    while value is not None:
        node = value.producer()
        if node is None or node.op_type not in BETWEEN:
            break
        value = node.inputs[0]
    return value
