"""Pooling of an embedding model: the steps from a text's hidden states to a vector, from its checkpoint."""

from dataclasses import dataclass, field

from enginewright.embedding import EmbeddingConfig


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling."""

    tensor: str  # name in the checkpoint, without `.weight` and `.bias`
    width: int  # output columns
    bias: bool  # True if it has a bias
    activation: str  # "identity" or "tanh"


@dataclass(frozen=True)
class Pooling:
    """The steps from all hidden states of a text to one vector, and to the result."""

    kind: str  # one of plugins/elementwise/pool.py's POOLINGS
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # configuration of the runtime
    dense: tuple[Dense, ...] = ()  # linear layers, in order
    max_tokens: int | None = None  # limit of a text's tokens; None is the model's own
