"""Checkpoints: the sources of a build's config, tokenizer and weights."""

from enginewright.builder.checkpoint.base import Checkpoint, TensorInfo, TokenizerFiles
from enginewright.builder.checkpoint.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "TokenizerFiles", "open_checkpoint"]
