"""Pooling, in the place of an embedding model's head: one row of all rows of a text, then linear layers."""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.pooling import Dense, Pooling
from enginewright.builder.weights import Weights
from enginewright.embedding import EmbeddingConfig
from enginewright.plugins.elementwise.pool import POOL
from enginewright.plugins.elementwise.softcap import SOFTCAP

CLASSIFIER = "classifier"
# Activations of a cross-encoder's score in sentence-transformers.
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def write_pooling(graph: GraphWriter, x: ir.Value, pooling: Pooling) -> ir.Value:
    """Writes the pooling: one row per text, [1, S, V].

    Args:
        graph: graph to write into.
        x: hidden states, [1, T, W].
        pooling: config of the pooling.
    """
    graph.embeds(pooling)
    value = graph.plugin(POOL, [x], "pool", pooling=pooling.kind).outputs[0]
    for dense in pooling.dense:
        value = graph.linear(value, dense.tensor, dense.width, dense.bias)
        if dense.activation == "tanh":
            value = graph.plugin(SOFTCAP, [value], f"{value.name}.tanh", cap=1.0).outputs[0]
    return value


def read_classifier(config: ConfigReader, weights: Weights, pooler: str, hidden: int) -> Pooling | None:
    """Reads the pooling of a cross-encoder, which scores a pair of texts by its first token.

    Args:
        config: config of the model.
        weights: weights of the checkpoint.
        pooler: name of the linear layer before the classifier.
        hidden: columns of the residual stream.

    Returns:
        The pooling; None for a model without a classifier.

    Raises:
        UnsupportedModelError: it has several classes, or the score has an activation that is not implemented.
    """
    info = weights.tensors.find(f"{CLASSIFIER}.weight")
    section = config.section("sentence_transformers")
    name = config.read(str, "sbert_ce_default_activation_function", default="torch.nn.modules.activation.Sigmoid")
    if section is not None:
        name = section.read(str, "activation_fn", default=name)
    if info is None:
        return None
    if info.shape[0] != 1:
        raise config.unsupported(f"a classifier of {info.shape[0]} classes", "A cross-encoder has one number.")
    if name not in _ACTIVATIONS:
        raise config.unsupported(f"activation_fn = {name!r}", f"Implemented are {', '.join(_ACTIVATIONS)}.")
    embedding = EmbeddingConfig(result="score", activation="sigmoid" if name.endswith("Sigmoid") else "identity")
    return Pooling("first", embedding, (Dense(pooler, hidden, True, "tanh"), Dense(CLASSIFIER, 1, True, "identity")))


def refuse_without(config: ConfigReader) -> Pooling:
    """Returns the checkpoint's pooling, for a model with bidirectional attention, which can only embed.

    Raises:
        UnsupportedModelError: the checkpoint has none.
    """
    if config.pooling is None:
        what = "attention is bidirectional, so that the model cannot generate text"
        fix = "Take a checkpoint with the files of sentence-transformers (modules.json), or a cross-encoder."
        raise config.unsupported(f"{what}, and the checkpoint has no pooling", fix)
    return config.pooling
