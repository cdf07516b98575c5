"""Multi-token prediction: a layer in the checkpoint that drafts tokens. https://arxiv.org/abs/2412.19437, §2.2

It reads the embedding of a token and the model's hidden state before it, and predicts the token that follows:

    x = fc([norm(embedding of token i + 1), norm(hidden state of token i)]),  a layer like the model's own,  a norm,
    and the model's own head

Hidden states are the model's after its last norm. When the layer drafts one more token, its own output after its norm
takes their place. After qwen3_5_mtp.py and deepseek_mtp.py of vllm/model_executor/models, of which the second
feeds back the output before its norm.
"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.decoder import DecoderParts, Layer
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.weights import Weights

LEFT_OUT = "of multi-token prediction, which --draft auto uses"  # note if nothing uses it


@dataclass(frozen=True)
class MtpNames:
    """Names of the layer's tensors in the checkpoint."""

    prefix: str  # prefix of all of them
    embedding_norm: str  # norm of the embedding
    hidden_norm: str  # norm of the hidden state
    joined: str  # linear layer that reads both
    layer: str  # the decoder layer
    norm: str  # last norm


def write_mtp(weights: Weights, parts: DecoderParts, layer: Layer, names: MtpNames) -> ir.Model:
    """Writes a graph of the layer alone.

    Args:
        weights: weights of the checkpoint.
        parts: parts of the model.
        layer: the layer, like those of the model.
        names: names of its tensors.
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


def write_mtp_after_layers(weights: Weights, parts: DecoderParts, layer: Layer) -> ir.Model | None:
    """Writes the layer of families that store it as one more layer after the model's; None if a checkpoint has none.

    Its embedding and head are the model's own, whatever the layer stores of them.

    Args:
        weights: weights of the checkpoint.
        parts: parts of the model.
        layer: the layer, like those of the model.
    """
    own = f"model.layers.{len(parts.layers)}"
    if not weights.has_any(f"{own}."):
        return None
    for shared in ("embed_tokens.weight", "shared_head.head.weight"):
        weights.ignore(f"{own}.{shared}", "The model's own is used: draft tokens need not be the layer's best.")
    names = MtpNames(f"{own}.", f"{own}.enorm", f"{own}.hnorm", f"{own}.eh_proj", own, f"{own}.shared_head.norm")
    return write_mtp(weights, parts, layer, names)
