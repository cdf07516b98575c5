"""Fuses an Add with the norm of its sum: the residual is read and written once."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import made_by, nodes_of, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins.norm.add_rms_norm import ADD_RMS_NORM
from enginewright.plugins.norm.rms_norm import norms_rows


@dataclass(frozen=True)
class FuseResidualNorm:
    """Replaces Add and RMSNormalization by AddRmsNorm."""

    name: str = "fuse_residual_norm"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for norm in nodes_of(model, "RMSNormalization"):
            total, weight = norm.inputs
            add = made_by(total, "Add")
            if add is None or weight is None:
                continue
            if not norms_rows(norm):
                refusals.append(f"{norm.name} normalizes over more than axis -1.")
                continue
            x, delta = add.inputs
            if x is None or delta is None or x.is_initializer() or delta.is_initializer():
                refusals.append(f"{norm.name} normalizes a sum with a constant.")
                continue
            if x.shape != delta.shape:
                refusals.append(f"{norm.name} normalizes a sum of different shapes.")
                continue
            epsilon = norm.attributes.get_float("epsilon", 1e-5)
            fused = ADD_RMS_NORM.node([x, delta, weight], epsilon=epsilon, to=int(ir.DataType.FLOAT), group=0)
            fused.name = norm.name
            replace([add, norm], [fused], list(zip((add.outputs[0], norm.outputs[0]), fused.outputs, strict=True)))
            rewrites += 1
        return PassResult(rewrites, tuple(refusals))
