"""The layer that a checkpoint carries to guess with: multi-token prediction. https://arxiv.org/abs/2412.19437, §2.2

It reads the embedding of a token and the model's hidden state before it, and says what comes behind that token:

    x = fc([norm(embedding of token i + 1), norm(hidden state of token i)]),  a layer like the model's own,  a norm,
    and the model's own head

Hidden states are those behind the model's last norm. What the layer gives behind its own norm takes their place where
it guesses a token more. After qwen3_5_mtp.py and deepseek_mtp.py of vllm/model_executor/models, of which the second
feeds back what comes before its norm.
"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.decoder import DecoderParts, Layer
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.weights import Weights

LEFT_OUT = "of the part that guesses further tokens, which --draft auto takes"  # a note, where nothing takes it


@dataclass(frozen=True)
class MtpNames:
    """Its tensors in the checkpoint."""

    prefix: str  # of them all
    embedding_norm: str
    hidden_norm: str
    joined: str  # the linear layer that reads both
    layer: str
    norm: str


def write_mtp(weights: Weights, parts: DecoderParts, layer: Layer, names: MtpNames) -> ir.Model:
    """A graph of its own.

    Args:
        parts: of the model.
        layer: like those of the model.
    """
    norm, width = parts.norm, parts.embedding.hidden
    graph = GraphWriter(weights, parts.max_positions)
    rope = layer.rope.write(graph, "rope") if layer.rope is not None else None
    token = norm.write(graph, parts.embedding.write(graph, "model.embed_tokens"), names.embedding_norm)
    before = norm.write(graph, graph.hidden_before(width), names.hidden_norm)
    x = graph.linear(graph.join([token, before], f"{names.joined}.joined"), names.joined, width)
    x = layer.write(graph, x, names.layer, 0, rope)
    graph.end_layer(x)
    logits = parts.head.write(graph, norm.write(graph, x, names.norm), "model.embed_tokens")
    weights.refuse_left_over(names.prefix)
    return graph.finish(logits)


def write_mtp_behind(weights: Weights, parts: DecoderParts, layer: Layer) -> ir.Model | None:
    """The same of families that store it as one more layer of the model; None where a checkpoint has none.

    What such layers have of the embedding and the head is what the model itself has.
    """
    own = f"model.layers.{len(parts.layers)}"
    if not weights.has_any(f"{own}."):
        return None
    for shared in ("embed_tokens.weight", "shared_head.head.weight"):
        weights.ignore(f"{own}.{shared}", "The model's own is used: draft tokens need not be the layer's best.")
    names = MtpNames(f"{own}.", f"{own}.enorm", f"{own}.hnorm", f"{own}.eh_proj", own, f"{own}.shared_head.norm")
    return write_mtp(weights, parts, layer, names)
