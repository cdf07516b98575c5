"""GPT-2: layer norms, learned positions, an MLP without a gate, weights stored [in, out]; and models built like it.

https://openai.com/index/better-language-models
"""

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_HEADS, MAX_LAYERS, MAX_TOKENS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GraphWriter, Head, Heads, LayerNorm, Mlp
from enginewright.builder.weights import Weights

_TRAINING = Harmless("It is about training, which is over.")
_SUMMARY = Harmless("It is about the classes of a classifier; weights of one would be refused.")
HARMLESS = {
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), _TRAINING),
    **{f"summary_{key}": _SUMMARY for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")},
    "n_ctx": Harmless("It repeats n_positions."),
    "reorder_and_upcast_attn": Harmless("It says how the reference rounds."),
    "scale_attn_by_inverse_layer_idx": Harmless("Scores of all layers have the same scale.", (False,)),
    "scale_attn_weights": Harmless("Scores are divided by the root of head_dim.", (True,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    hidden = config.read_size("n_embd", "hidden_size", maximum=MAX_COLUMNS)
    count = config.read_size("n_head", "num_attention_heads", maximum=MAX_HEADS)
    if hidden % count:
        raise config.error(f"n_embd is {hidden}, which is not a multiple of n_head, {count}")
    vocab = config.read_size("vocab_size", maximum=MAX_TOKENS)
    positions = config.read_size("n_positions", "max_position_embeddings")
    embedding = Embedding(vocab, hidden, positions=positions)
    head, norm = Head.read(config, tied=True), LayerNorm.read(config, "layer_norm_epsilon")
    mlp = Mlp.read(
        config,
        config.read_size("n_inner", default=4 * hidden, maximum=MAX_COLUMNS),
        key="activation_function",
        activation="gelu_new",
    )
    heads = Heads(count, count, hidden // count)
    attention = Attention(heads, bias=True, output_bias=True, output_name="c_proj")
    layers = config.read_size("n_layer", "num_hidden_layers", maximum=MAX_LAYERS)
    config.refuse_unread(HARMLESS)
    top = "transformer." if any(name.startswith("transformer.") for name in weights.tensors.names) else ""
    for mask in (".attn.bias", ".attn.masked_bias"):
        weights.ignore(mask, "It is a mask of old checkpoints: every token attends to those before it.")

    graph = GraphWriter(weights, positions)
    x = embedding.write(graph, f"{top}wte", f"{top}wpe")
    for layer in range(layers):
        name = f"{top}h.{layer}"
        weights.cut(f"{name}.attn.c_attn", heads.cut_fused(f"{name}.attn"), transposed=True)
        for part, rows in (("attn.c_proj", hidden), ("mlp.c_fc", mlp.width), ("mlp.c_proj", hidden)):
            weights.cut(f"{name}.{part}", {f"{name}.{part}": range(rows)}, transposed=True)
        h = norm.write(graph, x, f"{name}.ln_1")
        x = graph.add(x, attention.write(graph, h, f"{name}.attn", layer, None))
        h = norm.write(graph, x, f"{name}.ln_2")
        x = graph.add(x, mlp.write(graph, h, f"{name}.mlp"))
        graph.end_layer(x)
    h = norm.write(graph, x, f"{top}ln_f")
    return graph.finish(head.write(graph, h, f"{top}wte"))
