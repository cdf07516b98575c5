"""Makes hidden states of all tokens an output of the graph, for heads that propose draft tokens."""

import json
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import head_of, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.plan import HIDDEN
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class ShowHidden:
    """Adds the output HIDDEN to a graph."""

    # numbers of layers whose states are the output, side by side: 3 is the state after the first three layers; (): the
    # state after the last norm, which the model's head reads
    layers: tuple[int, ...] = ()
    name: str = "show_hidden"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        head = head_of(model)
        assert head is not None, "a model that writes no text has no hidden states to show"
        shown = head.x
        if self.layers:
            ends: list[str] = json.loads(model.metadata_props["enginewright.layer_ends"])
            values = {value.name: value for node in model.graph for value in node.outputs}
            states = [values[ends[count - 1]] for count in self.layers]
            shown = typed(HIDDEN, ir.DataType.FLOAT, (*dims_of(states[0])[:-1], sum(map(width_of, states))))
            model.graph.append(standard("Concat", states, [shown], HIDDEN, axis=-1))
        shown.name = HIDDEN
        model.graph.outputs.append(shown)
        return PassResult(1)
