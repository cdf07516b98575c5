"""What embedding models have in the place of a head: one row of all rows of a text, and linear layers of that."""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.pooling import Dense, Pooling
from enginewright.builder.weights import Weights
from enginewright.embedding import EmbeddingConfig
from enginewright.plugins.elementwise.pool import POOL
from enginewright.plugins.elementwise.softcap import SOFTCAP

CLASSIFIER = "classifier"
# What sentence-transformers may put a cross-encoder's score through.
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def write_pooling(graph: GraphWriter, x: ir.Value, pooling: Pooling) -> ir.Value:
    """x: [1, T, W], the hidden states. Gives [1, S, V]: one row for each text."""
    graph.embeds(pooling)
    value = graph.plugin(POOL, [x], "pool", pooling=pooling.kind).outputs[0]
    for dense in pooling.dense:
        value = graph.linear(value, dense.tensor, dense.width, dense.bias)
        if dense.activation == "tanh":
            value = graph.plugin(SOFTCAP, [value], f"{value.name}.tanh", cap=1.0).outputs[0]
    return value


def read_classifier(config: ConfigReader, weights: Weights, pooler: str, hidden: int) -> Pooling | None:
    """Of a cross-encoder, which scores a pair of texts by its first token; None for a model without a classifier.

    Raises:
        UnsupportedModelError: it has several classes, or something is done to the score that is not implemented.
    """
    info = weights.tensors.find(f"{CLASSIFIER}.weight")
    beside = config.section("sentence_transformers")
    name = config.read(str, "sbert_ce_default_activation_function", default="torch.nn.modules.activation.Sigmoid")
    if beside is not None:
        name = beside.read(str, "activation_fn", default=name)
    if info is None:
        return None
    if info.shape[0] != 1:
        raise config.unsupported(f"a classifier of {info.shape[0]} classes", "A cross-encoder has one number.")
    if name not in _ACTIVATIONS:
        raise config.unsupported(f"activation_fn = {name!r}", f"Implemented are {', '.join(_ACTIVATIONS)}.")
    embedding = EmbeddingConfig(result="score", activation="sigmoid" if name.endswith("Sigmoid") else "identity")
    return Pooling("first", embedding, (Dense(pooler, hidden, True, "tanh"), Dense(CLASSIFIER, 1, True, "identity")))


def refuse_without(config: ConfigReader) -> Pooling:
    """The checkpoint's pooling, of a model whose tokens see those behind them: it can do nothing else than embed.

    Raises:
        UnsupportedModelError: it says nothing of one.
    """
    if config.pooling is None:
        what = "tokens see those behind them, so that the model writes no text"
        fix = "Take a checkpoint with the files of sentence-transformers (modules.json), or a cross-encoder."
        raise config.unsupported(f"{what}, and nothing says how it embeds one", fix)
    return config.pooling
