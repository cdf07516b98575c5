"""The head: from the residual stream to logits, or to a vector of the text."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_TOKENS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.pooling import write_pooling
from enginewright.builder.pooling import Pooling
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.plugins.plugin import width_of


@dataclass(frozen=True)
class Head:
    """Logits, [1, T, vocab]; in an embedding model, which has no head, vectors [1, S, width]."""

    vocab: int  # rows of the weight
    tied: bool  # True if the embedding's table is the weight, unless the checkpoint has one for the head
    softcap: float = 0.0  # limit of the logits, ±softcap; 0 is none
    pooling: Pooling | None = None  # pooling of an embedding model; None in other models

    @staticmethod
    def read(config: ConfigReader, tied: bool = False, softcap: float = 0.0) -> "Head":
        """Reads the head.

        Args:
            config: config of the model.
            tied: default of tie_word_embeddings.
            softcap: limit of the logits; 0 is none.
        """
        return Head(
            vocab=config.read_size("vocab_size", maximum=MAX_TOKENS),
            tied=config.read(bool, "tie_word_embeddings", default=tied),
            softcap=softcap,
            pooling=config.pooling,
        )

    def write(self, graph: GraphWriter, x: ir.Value, embedding: str) -> ir.Value:
        """Writes the head, or the pooling of an embedding model.

        Args:
            graph: graph to write into.
            x: residual stream after the last norm.
            embedding: name of the embedding, whose table is the weight of a tied head.
        """
        if self.pooling is not None:
            graph.weights.ignore("lm_head.weight", "It is a head: vectors are made of what is before it.")
            return write_pooling(graph, x, self.pooling)
        shape = (self.vocab, width_of(x))
        tied = self.tied and graph.weights.is_tied("lm_head.weight", f"{embedding}.weight", shape)
        logits = graph.linear(x, embedding if tied else "lm_head", self.vocab)
        node = logits.producer()
        assert node is not None
        node.name = logits.name = "lm_head"
        if not self.softcap:
            return logits
        return graph.plugin(SOFTCAP, [logits], "lm_head.softcap", cap=self.softcap).outputs[0]
