"""Medusa: several heads that predict at once, all from one hidden state. https://arxiv.org/abs/2401.10774

The state is the one after the model's last norm. Head i predicts the token i + 2 positions after that of the state:

    x + silu(linear(x)), once for each of its layers, and a table of its own for logits

The heads are experts here, each row's by its head: so one graph has all of them, a row reads the weights of one, and a
row is sampled as those of other drafts are. A single 1 in the first columns of a row selects its head. Source:
medusa/model/medusa_model.py of FasterDecoding/Medusa and vllm/model_executor/models/medusa.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from enginewright.builder.checkpoint.head import HeadFolder
from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.heads.base import HeadGraph, TargetModel, no_head
from enginewright.builder.models.blocks.experts import MAX_EXPERTS
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.tensors import Tensors
from enginewright.builder.weights import Weights
from enginewright.passes.show_hidden import ShowHidden
from enginewright.plugins.experts.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.experts.grouped_linear import GROUPED_LINEAR
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.experts.sort_rows import SORT_ROWS

MAX_LAYERS = 64  # limit of the layers of a head
PREFIXES = ("medusa_head.", "medusa_heads.")  # prefixes that all names of tensors may have
HARMLESS = {
    "base_model_name_or_path": Harmless("It says which model the heads are for."),
    "max_paths": Harmless("It is about trees of draft tokens, and drafts are chains here."),
    "max_seq_len": Harmless("Heads see one token, wherever it is."),
    "model_type": Harmless("It is that of the model, or medusa."),
    "original_lm_head": Harmless("Each head has a table of its own for logits.", (False,)),
    "topk": Harmless("It is about trees of draft tokens, and drafts are chains here."),
    "version": Harmless("It says where the checkpoint comes from."),
}


class _Names(NamedTuple):
    """Name patterns of a head's tensors, with the numbers of the head and of its layer."""

    layer: str  # linear layer
    logits: str  # table for logits


def build_medusa(folder: HeadFolder, model: TargetModel) -> HeadGraph:
    """Builds the graph of all heads.

    Args:
        folder: the heads.
        model: the model that they are for.

    Raises:
        UsageError: they belong to another model.
        UnsupportedModelError: they have a feature that is not implemented.
        EngineError: config and tensors do not fit together.
    """
    model.check_last_norm()
    config, weights = ConfigReader(folder.config), Weights(Tensors(folder))
    heads = config.read_size("medusa_num_heads", "num_heads", maximum=MAX_EXPERTS)
    layers = config.read_size("medusa_num_layers", "num_hidden_layers", default=1, maximum=MAX_LAYERS)
    width = config.read_size("hidden_size", default=model.width)
    vocab = config.read_size("vocab_size", default=model.vocab)
    known = config.read_size("truncated_vocab_size", default=vocab)
    if known != vocab:
        raise config.unsupported(f"truncated_vocab_size = {known}", "Only heads for all tokens are implemented.")
    names = _names(weights, layers)
    bias = config.read(bool, "medusa_fc_bias", default="linear" in names.layer)
    config.refuse_unread(HARMLESS)
    for differs, why in (
        (width != model.width, f"they read states of {width} columns, and the model's have {model.width}"),
        (vocab != model.vocab, f"they have {vocab} tokens, and the model {model.vocab}"),
    ):
        if differs:
            raise no_head(folder.name, model.name, why)

    graph = GraphWriter(weights, max_positions=heads)
    head, state = graph.split(graph.hidden_before(heads + width), "given", heads, width)
    places, share, starts = _route(graph, head, heads)
    to = int(ir.DataType.FLOAT)
    x = graph.plugin(SORT_ROWS, [state, places], "sorted", to=to, group=0).outputs[0]

    def linear(x: ir.Value, name: str, parts: Sequence[str], rows: int, bias: bool) -> ir.Value:
        stacked = [weights.stacked(f"{name}.weight", [f"{part}.weight" for part in parts], (rows, width)), None]
        if bias:
            stacked[1] = weights.stacked(f"{name}.bias", [f"{part}.bias" for part in parts], (rows,))
        return graph.plugin(GROUPED_LINEAR, [x, *stacked, starts], name, epilogue="none", to=to).outputs[0]

    for layer in range(layers):
        parts = [names.layer.format(head=number, layer=layer) for number in range(heads)]
        h = linear(x, f"layers.{layer}", parts, width, bias)
        x = graph.add(x, graph.activation("silu", h, f"layers.{layer}.active"))
    logits = linear(x, "lm_heads", [names.logits.format(head=number) for number in range(heads)], vocab, bias=False)
    weights.refuse_left_over()
    (chosen,) = graph.plugin(COMBINE_EXPERTS, [logits, places, share], "by_row").outputs
    return HeadGraph(graph.finish(chosen), reads=ShowHidden())


def _names(weights: Weights, layers: int) -> _Names:
    """Finds the names of the tensors, as Medusa or vLLM store them."""
    prefix = next((prefix for prefix in PREFIXES if weights.has_any(prefix)), "")
    if weights.has_any(f"{prefix}blocks."):
        return _Names(f"{prefix}blocks.{{head}}.layers.{{layer}}", f"{prefix}lm_heads.{{head}}")
    return _Names(f"{prefix}{{head}}.{{layer}}.linear", f"{prefix}{{head}}.{layers}")


def _route(graph: GraphWriter, head: ir.Value, heads: int) -> Sequence[ir.Value]:
    """Routes each row to the head whose column has a 1, with a share of 1.

    Returns:
        Places, share and starts, as in plugins/experts/route.py.
    """
    weight = graph.constant("heads", np.eye(heads, dtype=np.float32))
    groups = {"groups": 1, "chosen_groups": 1, "group_best": 1}
    node = graph.plugin(ROUTE, [head, weight], "route", top=1, scores="softmax", **groups, normalized=1, scale=1.0)
    for output, part in zip(node.outputs, ("places", "share", "starts"), strict=True):
        output.name = part
    return node.outputs
