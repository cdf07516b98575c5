"""Hidden states of all tokens become an output of the graph: what heads guess from."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import head_of
from enginewright.passes.pass_manager import PassResult
from enginewright.plan import HIDDEN


@dataclass(frozen=True)
class ShowHidden:
    """Shows what the model's head reads: the states behind the last norm."""

    name: str = "show_hidden"

    def __call__(self, model: ir.Model) -> PassResult:
        head = head_of(model)
        assert head is not None, "a model that writes no text is asked for hidden states"
        head.x.name = HIDDEN
        model.graph.outputs.append(head.x)
        return PassResult(1)
