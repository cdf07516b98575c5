"""The head: from the residual stream to logits, or to a vector of the text."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MOST_TOKENS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.pooling import write_pooling
from enginewright.builder.pooling import Pooling
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.plugins.plugin import width_of


@dataclass(frozen=True)
class Head:
    """Logits, [1, T, vocab]; of an embedding model, which needs no head, [1, S, width]."""

    vocab: int
    tied: bool  # the embedding's table is the weight, unless the checkpoint has another one for the head
    softcap: float = 0.0  # logits stay within ±softcap; 0 is no limit
    pooling: Pooling | None = None  # of an embedding model

    @staticmethod
    def read(config: ConfigReader, tied: bool = False, softcap: float = 0.0) -> "Head":
        """tied: where the config does not say it."""
        return Head(
            vocab=config.read_size("vocab_size", most=MOST_TOKENS),
            tied=config.read(bool, "tie_word_embeddings", default=tied),
            softcap=softcap,
            pooling=config.pooling,
        )

    def write(self, graph: GraphWriter, x: ir.Value, embedding: str) -> ir.Value:
        """embedding: the tensor that is the weight of a tied head."""
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
