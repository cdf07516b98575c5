"""Removes what nothing reads: nodes, and weights."""

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from enginewright.passes.pass_manager import PassResult


@dataclass(frozen=True)
class Cleanup:
    name: str = "cleanup"

    def __call__(self, model: ir.Model) -> PassResult:
        before = len(model.graph)
        RemoveUnusedNodesPass()(model)
        return PassResult(before - len(model.graph))
