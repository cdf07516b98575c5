"""ModernBERT, an encoder for embedding models: a rope, gated MLPs, and in two layers of three a window around a token.

https://arxiv.org/abs/2412.13663
"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_TOKENS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GraphWriter, Heads, LayerNorm
from enginewright.builder.models.blocks.layers import read_layer_count, read_windows
from enginewright.builder.models.blocks.pooling import refuse_without, write_pooling
from enginewright.builder.models.blocks.rope import read_local_and_global
from enginewright.builder.weights import Weights
from enginewright.plugins.attention.masked_attention import EVERYTHING

_TRAINING = Harmless("It is about training, which is over.")
_HEAD = Harmless("It is about another head than the pooling; weights of a classifier would be refused.")
HARMLESS = {
    **dict.fromkeys(
        (
            "classifier_dropout",
            "embedding_dropout",
            "initializer_cutoff_factor",
            "mlp_dropout",
            "sparse_pred_ignore_index",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias"), _HEAD),
    "cls_token_id": Harmless("The tokenizer writes it."),
    "deterministic_flash_attn": Harmless("It says how the reference rounds."),
    "hidden_activation": Harmless("MLPs are gated by GELU.", ("gelu",)),
    "norm_bias": Harmless("Norms have no bias.", (False,)),
    "position_embedding_type": Harmless("Nothing reads it; positions are in the rope."),
    "reference_compile": Harmless("It says how the reference runs."),
    "repad_logits_with_grad": _TRAINING,
    "sep_token_id": Harmless("The tokenizer writes it."),
    "sparse_prediction": _TRAINING,
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    pooling, hidden = refuse_without(config), config.read_size("hidden_size", maximum=MAX_COLUMNS)
    vocab, width = (
        config.read_size("vocab_size", maximum=MAX_TOKENS),
        config.read_size("intermediate_size", maximum=MAX_COLUMNS),
    )
    config.read(bool, "tie_word_embeddings", default=True)  # of a head that is left out
    bias, mlp_bias = (config.read(bool, f"{part}_bias", default=False) for part in ("attention", "mlp"))
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, output_name="Wo")
    norm = LayerNorm(config.read_positive("norm_eps", default=1e-5), bias=False)
    every = config.read_size("global_attn_every_n_layers", default=3)
    slides = [bool(layer % every) for layer in range(read_layer_count(config))]
    windows = read_windows(config, slides, config.read_size("local_attention", default=128))
    max_positions = config.read_size("max_position_embeddings")
    thetas = (
        config.read_positive("local_rope_theta", default=1e4),
        config.read_positive("global_rope_theta", default=1.6e5),
    )
    local, everywhere = read_local_and_global(config, *thetas, attention.heads.dim, max_positions)
    config.refuse_unread(HARMLESS)
    weights.leave_out("head.", "the head for masked words is left out")
    weights.leave_out("decoder.", "the head for masked words is left out")

    graph = GraphWriter(weights, max_positions)
    local_table, global_table = local.write(graph, "rope.local"), everywhere.write(graph, "rope.global")
    x = Embedding(vocab, hidden).write(graph, "model.embeddings.tok_embeddings")
    x = norm.write(graph, x, "model.embeddings.norm")
    for layer, window in enumerate(windows):
        name = f"model.layers.{layer}"
        weights.cut(f"{name}.attn.Wqkv", attention.heads.cut_fused(f"{name}.attn"))
        reach = window // 2
        seeing = replace(attention, window=reach + 1 if window else 0, lookahead=reach if window else EVERYTHING)
        h = norm.write(graph, x, f"{name}.attn_norm") if layer else x
        x = graph.add(x, seeing.write(graph, h, f"{name}.attn", layer, local_table if window else global_table))
        h, mlp = norm.write(graph, x, f"{name}.mlp_norm"), f"{name}.mlp"
        rows = {"gate": range(width), "up": range(width, 2 * width)}
        weights.cut(f"{mlp}.Wi", {f"{mlp}.{part}_proj": part_rows for part, part_rows in rows.items()})
        gate, up = (graph.linear(h, f"{mlp}.{part}_proj", width, mlp_bias) for part in rows)
        gated = graph.activation("gelu", up, f"layers.{layer}.mlp.gated", gate)
        x = graph.add(x, graph.linear(gated, f"{mlp}.Wo", hidden, mlp_bias))
    return graph.finish(write_pooling(graph, norm.write(graph, x, "model.final_norm"), pooling))
