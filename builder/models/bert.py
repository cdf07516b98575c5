"""BERT, an encoder with bidirectional attention: embedding models such as all-MiniLM-L6-v2, and cross-encoders.

https://arxiv.org/abs/1810.04805
"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_TOKENS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GraphWriter, Heads, LayerNorm, Mlp
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.pooling import read_classifier, refuse_without, write_pooling
from enginewright.builder.weights import Weights
from enginewright.plugins.attention.masked_attention import EVERYTHING

_TRAINING = Harmless("It is about training, which is over.")
_POOLER = Harmless("It repeats properties of the pooler's weights.")
HARMLESS = {
    **dict.fromkeys(("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"), _TRAINING),
    **{
        f"pooler_{key}": _POOLER for key in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
    },
    "add_cross_attention": Harmless("There is no other model to attend to.", (False,)),
    "directionality": Harmless("Tokens see the whole text.", ("bidi",)),
    "is_decoder": Harmless("Tokens see the whole text.", (False,)),
    "position_embedding_type": Harmless("Positions have a table.", ("absolute",)),
    "tie_word_embeddings": Harmless("It is about the head for masked words, which is left out."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    hidden = config.read_size("hidden_size", maximum=MAX_COLUMNS)
    positions, types = config.read_size("max_position_embeddings"), config.read_size("type_vocab_size", default=2)
    vocab = config.read_size("vocab_size", maximum=MAX_TOKENS)
    embedding = Embedding(vocab, hidden, positions=positions, types=types)
    heads, norm = Heads.read(config), LayerNorm(config.read_positive("layer_norm_eps", default=1e-12))
    attention = Attention(heads, bias=True, output_bias=True, lookahead=EVERYTHING)
    width = config.read_size("intermediate_size", maximum=MAX_COLUMNS)
    mlp = Mlp.read(config, width, key="hidden_act", activation="gelu")
    mlp = replace(mlp, up_name="intermediate.dense", down_name="output.dense")
    layers = read_layer_count(config)
    top = "bert." if any(name.startswith("bert.") for name in weights.tensors.names) else ""
    pooling = read_classifier(config, weights, f"{top}pooler.dense", hidden) or refuse_without(config)
    config.refuse_unread(HARMLESS)
    weights.ignore("embeddings.position_ids", "It is a buffer of old checkpoints: positions are counted from 0.")
    weights.leave_out("cls.", "the head for masked words is left out")
    if pooling.embedding.result == "embedding":
        weights.leave_out(f"{top}pooler.", "the pooler of another head is left out")

    graph = GraphWriter(weights, positions)
    names = [f"{top}embeddings.{name}_embeddings" for name in ("word", "position", "token_type")]
    x = norm.write(graph, embedding.write(graph, *names), f"{top}embeddings.LayerNorm")
    for layer in range(layers):
        name = f"{top}encoder.layer.{layer}"
        for part, whole in zip("qkvo", ("self.query", "self.key", "self.value", "output.dense"), strict=True):
            weights.cut(f"{name}.attention.{whole}", {f"{name}.attention.{part}_proj": range(hidden)})
        y = attention.write(graph, x, f"{name}.attention", layer, None)
        x = norm.write(graph, graph.add(x, y), f"{name}.attention.output.LayerNorm")
        x = norm.write(graph, graph.add(x, mlp.write(graph, x, name)), f"{name}.output.LayerNorm")
    return graph.finish(write_pooling(graph, x, pooling))
