"""SmolLM 3: llama, in which every fourth layer has no positions. https://huggingface.co/blog/smollm3"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    GatedMlp,
    Head,
    Heads,
    Layer,
    RmsNorm,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_layer_count, read_window, read_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "max_window_layers": Harmless("It is left over from Qwen's configs: layer_types says where windows are."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config, tied=True)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    rope, max_positions = read_rope(config, attention.heads.dim, 2e6), config.read_size("max_position_embeddings")
    rotates = _rotates(config)
    layers = [
        Layer(replace(attention, window=window), mlp, norm, rope=rope if own else None)
        for own, window in zip(rotates, _windows(config, rotates), strict=True)
    ]
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


def _windows(config: ConfigReader, rotates: list[bool]) -> list[int]:
    """Reads windows; without `layer_types`, layers without a rope have one if `use_sliding_window` is true.

    `layer_types` counts without `use_sliding_window`, too: transformers masks attention by it alone.
    """
    window, used = read_window(config), config.read(bool, "use_sliding_window", default=False)
    return read_windows(config, [used and window > 0 and not own for own in rotates], window)


def _rotates(config: ConfigReader) -> list[bool]:
    """Reads which layers have a rope: those with 1 in `no_rope_layers`, despite its name."""
    count, every = read_layer_count(config), config.read_size("no_rope_layer_interval", default=4)
    listed = config.read_list(int, "no_rope_layers")
    if listed is None:
        return [(layer + 1) % every != 0 for layer in range(count)]
    if len(listed) != count:
        raise config.error(f"no_rope_layers has {len(listed)} entries, but num_hidden_layers is {count}")
    return [bool(own) for own in listed]
