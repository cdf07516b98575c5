"""Fuses the gate and up projections of a gated MLP into one matrix product. https://arxiv.org/abs/2002.05202"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.fusion.gated import gated_product
from enginewright.passes.fusion.siblings import stack
from enginewright.passes.graph import linear_of, nodes_of
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import forget_format, stored, stored_alike

RESTORED = "restored, because gate and up projection are quantized in different formats"


@dataclass(frozen=True)
class FuseGateUp:
    """Stacks the gate and up projections of every gated MLP."""

    name: str = "fuse_gate_up"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals, notes = 0, [], []
        for node in nodes_of(model, "Mul"):
            gated = gated_product(node)
            if gated is None:
                continue
            gate, up = linear_of(gated.gate), linear_of(gated.up)
            if gate is None or up is None:
                refusal: str | None = f"{node.name} does not multiply two linear layers."
            else:
                weights = (gate.weight, up.weight)
                if not stored_alike(weights):  # kernels exist for the fused product alone
                    notes += [RESTORED for weight in weights if stored(weight)]
                    for weight in weights:
                        forget_format(weight)
                refusal = stack((gate, up), "gate_up_proj")
            rewrites += refusal is None
            refusals += [refusal] if refusal else []
        return PassResult(rewrites, tuple(refusals), tuple(notes))
