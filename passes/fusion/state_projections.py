"""Fuses the input projections of a gated delta net into one matrix product."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.fusion.siblings import stack
from enginewright.passes.graph import linear_of, made_by, nodes_of
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN


@dataclass(frozen=True)
class FuseStateProjections:
    """Stacks the input projections of every GatedDelta."""

    name: str = "fuse_state_projections"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for node in nodes_of(model, "GatedDelta", domain=DOMAIN):
            refusal = _fuse(node)
            rewrites += refusal is None
            refusals += [refusal] if refusal else []
        return PassResult(rewrites, tuple(refusals))


def _fuse(node: ir.Node) -> str | None:
    """Stacks the projections to the convolution, the norm's gate, decays and corrections.

    If queries, keys and values have their own convolutions (Kimi), it stacks these three and the one to corrections.
    """
    apart = [made_by(value, "CausalConv", DOMAIN) for value in node.inputs[:3]]
    if None not in apart:
        return _stack(node, [*(conv.inputs[0] for conv in apart if conv is not None), node.inputs[4]])
    split = made_by(node.inputs[0], "Split")
    conv = None if split is None else made_by(split.inputs[0], "CausalConv", DOMAIN)
    norm = next(iter(node.outputs[1].consumers()), None)
    if conv is None or norm is None or norm.op_type != "GatedRmsNorm":
        return f"{node.name} is not between a convolution and a norm."
    return _stack(node, (conv.inputs[0], norm.inputs[1], node.inputs[3], node.inputs[4]))


def _stack(node: ir.Node, values: Sequence[ir.Value | None]) -> str | None:
    found = [linear_of(value) for value in values]
    siblings = [linear for linear in found if linear is not None]
    if len(siblings) < len(found):
        return f"{node.name} does not read four linear layers."
    return stack(siblings, "in_proj")
