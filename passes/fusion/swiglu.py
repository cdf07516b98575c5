"""Moves the gated product of an MLP into the epilogue of the matrix product before it."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.fusion.gated import gated_product
from enginewright.passes.graph import made_by, nodes_of, only_used_by, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import plugin_of


@dataclass(frozen=True)
class FuseSwiGlu:
    """Fuses GEMM, Split and gated product into a GEMM with a gated epilogue."""

    name: str = "fuse_swiglu"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for node in nodes_of(model, "Mul"):
            gated = gated_product(node)
            split = made_by(gated.gate, "Split") if gated else None
            gemm = split.inputs[0].producer() if split is not None and split.inputs[0] is not None else None
            plugin = plugin_of(gemm) if gemm is not None else None
            if gated is None or split is None or gemm is None or plugin is None or "epilogue" not in plugin.attributes:
                continue
            if gemm.attributes["epilogue"].as_string() != "none":
                refusals.append(f"{gemm.name} has an epilogue already, and {node.name} would be its second.")
                continue
            if tuple(split.outputs) != (gated.gate, gated.up):
                refusals.append(f"{node.name} reads other columns than the gate and the up of {gemm.name}.")
                continue
            inner = [gemm.outputs[0], *split.outputs, *(each.outputs[0] for each in gated.nodes[:-1])]
            if not all(only_used_by(value, split, *gated.nodes) for value in inner):
                refusals.append(f"A value between {gemm.name} and {node.name} is used elsewhere, too.")
                continue
            attributes = {name: attribute.value for name, attribute in gemm.attributes.items()}
            fused = plugin.node(gemm.inputs, **{**attributes, "epilogue": gated.epilogue})
            fused.name = gemm.name
            replace([gemm, split, *gated.nodes], [fused], [(node.outputs[0], fused.outputs[0])])
            rewrites += 1
        return PassResult(rewrites, tuple(refusals))
