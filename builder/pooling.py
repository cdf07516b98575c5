"""What an embedding model makes of the hidden states of a text, as its checkpoint says it."""

from dataclasses import dataclass, field

from enginewright.embedding import EmbeddingConfig


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling."""

    tensor: str  # its name in the checkpoint, without `.weight` and `.bias`
    width: int  # columns of what it gives
    bias: bool
    activation: str  # "identity" or "tanh"


@dataclass(frozen=True)
class Pooling:
    """One vector of all hidden states of a text, and what becomes of that."""

    kind: str  # one of plugins/elementwise/pool.py's POOLINGS
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # for the runtime
    dense: tuple[Dense, ...] = ()
    max_tokens: int | None = None  # of a text; None is what the model was made for
