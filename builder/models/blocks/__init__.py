"""What decoders are put together from: each block is a frozen config that writes its own nodes into a graph."""

from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.mlp import GatedMlp
from enginewright.builder.models.blocks.norm import RmsNorm

__all__ = ["Attention", "Embedding", "GatedMlp", "GraphWriter", "Head", "Heads", "RmsNorm"]
