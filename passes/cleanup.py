"""Removes nodes and weights that nothing reads."""

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginewright.passes.pass_manager import PassResult


@dataclass(frozen=True)
class Cleanup:
    """Removes nodes and weights that nothing reads; each removed node counts as a rewrite."""

    name: str = "cleanup"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        before = len(model.graph)
        RemoveUnusedNodesPass()(model)
        return PassResult(before - len(model.graph))
