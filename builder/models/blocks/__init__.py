"""Blocks of decoders: each is a frozen config that writes its own nodes into a graph."""

from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.decoder import Layer, SideBySide, write_decoder
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import ExpertNames, Experts, Routing
from enginewright.builder.models.blocks.gated_delta_net import GatedDeltaNet
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.kimi_delta import KimiDelta
from enginewright.builder.models.blocks.latent_attention import LatentAttention
from enginewright.builder.models.blocks.mamba2 import Mamba2
from enginewright.builder.models.blocks.mlp import GatedMlp, Mlp
from enginewright.builder.models.blocks.norm import LayerNorm, RmsNorm
from enginewright.builder.models.blocks.short_conv import ShortConv

__all__ = [
    "Attention",
    "Embedding",
    "ExpertNames",
    "Experts",
    "GatedDeltaNet",
    "GatedMlp",
    "GraphWriter",
    "Head",
    "Heads",
    "KimiDelta",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "Mamba2",
    "Mlp",
    "RmsNorm",
    "Routing",
    "ShortConv",
    "SideBySide",
    "write_decoder",
]
