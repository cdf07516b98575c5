"""Gemma 4, text: heads differ by kind of layer, upper layers read keys and values of lower ones, each layer has vectors
of tokens, and one size has experts.
https://huggingface.co/docs/transformers/model_doc/gemma4"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from enginewright.builder.config import MAX_COLUMNS, MAX_HEAD_DIM, MAX_HEADS, MAX_TOKENS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    ExpertNames,
    Experts,
    GatedMlp,
    GraphWriter,
    Head,
    Heads,
    RmsNorm,
    Routing,
)
from enginewright.builder.models.blocks.layers import read_layer_count, read_windows
from enginewright.builder.models.blocks.mlp import PLAIN_ACTIVATIONS, read_activation
from enginewright.builder.models.blocks.rope import Rope, rope_from
from enginewright.builder.weights import Weights
from enginewright.plugins.plugin import width_of

HARMLESS = {
    "use_bidirectional_attention": Harmless("It only applies to pictures, and there are none.", (False, "vision")),
}


DEFAULT_ROPES = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    norm, count = RmsNorm.read(config), read_layer_count(config)
    embedding = _scaled(Embedding.read(config))
    head = Head.read(config, tied=True, softcap=config.read(float, "final_logit_softcapping", default=0.0))
    mlp = GatedMlp.read(config, "hidden_activation", activation="gelu_pytorch_tanh")
    windows = _read_windows(config, count)
    attention = _read_attention(config, windows, norm)
    sources = _read_sources(config, windows)
    wide = config.read(bool, "use_double_wide_mlp", default=False)
    vectors = LayerVectors.read(config, embedding, norm, count)
    experts = _read_experts(config)
    max_positions = config.read_size("max_position_embeddings")
    dims = {bool(window): one.heads.dim for window, one in zip(windows, attention, strict=True)}
    ropes = _read_ropes(config, dims, max_positions)
    config.refuse_unread(HARMLESS)

    graph = GraphWriter(weights, max_positions)
    tables = {local: rope.write(graph, "rope.local" if local else "rope.global") for local, rope in ropes.items()}
    x = embedding.write(graph, "model.embed_tokens")
    of_layers = vectors.write(graph, x) if vectors else []
    for layer, window in enumerate(windows):
        name, source = f"model.layers.{layer}", sources[layer]
        own = replace(attention[layer], reads=source)
        if source is not None:
            for part in ("k_proj", "v_proj", "k_norm"):
                unused = f"layers.{layer}.self_attn.{part}.weight"
                weights.ignore(unused, "It is of a layer that reads the keys and values of another one.")
        h = norm.write(graph, x, f"{name}.input_layernorm")
        h = own.write(graph, h, f"{name}.self_attn", layer, tables[bool(window)])
        x = graph.add(x, norm.write(graph, h, f"{name}.post_attention_layernorm"))
        h = norm.write(graph, x, f"{name}.pre_feedforward_layernorm")
        h = (replace(mlp, width=2 * mlp.width) if wide and source is not None else mlp).write(graph, h, f"{name}.mlp")
        if experts is not None:
            h = _with_experts(graph, x, h, experts, norm, name)
        x = graph.add(x, norm.write(graph, h, f"{name}.post_feedforward_layernorm"))
        if vectors:
            x = graph.add(x, vectors.apply(graph, x, of_layers[layer], name))
        x = graph.scale(x, f"{name}.layer_scalar")
        graph.end_layer(x)
    h = norm.write(graph, x, "model.norm")
    return graph.finish(head.write(graph, h, "model.embed_tokens"))


@dataclass(frozen=True)
class LayerVectors:
    """Vectors for each token and layer, from a separate table and from a projection of the token's embedding."""

    table: Embedding  # table with the columns of all layers in order
    width: int  # columns of a vector
    norm: RmsNorm  # norm of each layer's projection
    norm_after: RmsNorm  # norm of the term that a layer adds
    activation: str  # activation of the gate, a name in plugins/elementwise/activation.py

    @staticmethod
    def read(config: ConfigReader, embedding: Embedding, norm: RmsNorm, layers: int) -> "LayerVectors | None":
        """Reads the vectors; None if the model has none."""
        vocab = config.read_size("vocab_size_per_layer_input", default=262_144, maximum=MAX_TOKENS)
        if config.holds("hidden_size_per_layer_input", 0):
            return None
        width = config.read_size("hidden_size_per_layer_input", default=256, maximum=MAX_COLUMNS)
        table = _scaled(Embedding(vocab, layers * width), width)
        assert table.scale is not None
        return LayerVectors(
            # The sum of both is divided by the root of 2.
            replace(table, scale=table.scale * 2**-0.5),
            width,
            # The projection is divided by the root of hidden, which its norm undoes except for the epsilon.
            replace(norm, epsilon=norm.epsilon * embedding.hidden, scale=2**-0.5),
            norm,
            PLAIN_ACTIVATIONS[read_activation(config, "hidden_activation", default="gelu_pytorch_tanh")],
        )

    def write(self, graph: GraphWriter, x: ir.Value) -> list[ir.Value]:
        """Writes the vectors of each layer, [1, T, width], from the embeddings x."""
        projected = graph.linear(x, "model.per_layer_model_projection", self.table.hidden)
        projected = self.norm.write_by_head(graph, projected, "model.per_layer_projection_norm", self.width)
        both = graph.add(self.table.write(graph, "model.embed_tokens_per_layer"), projected)
        return graph.split(both, "layer_vectors", *[self.width] * (self.table.hidden // self.width))

    def apply(self, graph: GraphWriter, x: ir.Value, vector: ir.Value, name: str) -> ir.Value:
        """Writes the term that a layer adds to x, [1, T, hidden]."""
        gate = graph.linear(x, f"{name}.per_layer_input_gate", self.width)
        gated = graph.activation(self.activation, vector, f"{gate.name}.gated", gate)
        h = graph.linear(gated, f"{name}.per_layer_projection", width_of(x))
        return self.norm_after.write(graph, h, f"{name}.post_per_layer_input_norm")


def _scaled(embedding: Embedding, width: int = 0) -> Embedding:
    """Scales rows by the root of their width, which in the reference has the precision of the table."""
    return replace(embedding, scale=torch.tensor((width or embedding.hidden) ** 0.5, dtype=torch.bfloat16).item())


def _read_windows(config: ConfigReader, count: int) -> list[int]:
    """Reads windows in tokens, 0 for a layer without one. The last layer never has one, as in transformers."""
    every = [bool((layer + 1) % 6) for layer in range(count)]
    windows = read_windows(config, every, config.read(int, "sliding_window", default=512))
    if windows[-1] and config.has("layer_types"):
        config.warn("layer_types gives the last layer a window: it has none, as in transformers")
    return [*windows[:-1], 0]


def _read_attention(config: ConfigReader, windows: Sequence[int], norm: RmsNorm) -> list[Attention]:
    """Reads attention of each layer. Layers without a window have other heads, and their keys may be their values."""
    bias = config.read(bool, "attention_bias", default=False)
    local, no_values = Heads.read(config, default_dim=256), config.read(bool, "attention_k_eq_v", default=False)
    heads = dict.fromkeys(range(len(windows)), local)
    if (overrides := config.section("per_layer_config")) is not None:
        heads |= {layer: _override(overrides, layer, local) for layer in range(len(windows))}
        overrides.refuse_any_unread()
    elif not config.has("per_layer_config"):
        dim = config.read_size("global_head_dim", default=512, maximum=MAX_HEAD_DIM)
        kv_count = config.read_size("num_global_key_value_heads", default=local.kv_count, maximum=MAX_HEADS)
        everywhere = Heads(local.count, kv_count if no_values else local.kv_count, dim).checked(config)
        heads |= {layer: everywhere for layer, window in enumerate(windows) if not window}
    return [
        Attention(
            heads[layer],
            scale=1.0,
            bias=bias,
            output_bias=bias,
            head_norm=norm,
            value_norm=replace(norm, weighted=False),
            keys_are_values=no_values and not window,
            window=window,
        )
        for layer, window in enumerate(windows)
    ]


def _override(overrides: ConfigReader, layer: int, heads: Heads) -> Heads:
    """Reads a layer's own keys, as transformers 5.23 writes them."""
    own = overrides.section(str(layer))
    if own is None:
        return heads
    dim = own.read_size("head_dim", default=heads.dim, maximum=MAX_HEAD_DIM)
    kv_count = own.read_size("num_key_value_heads", default=heads.kv_count, maximum=MAX_HEADS)
    own.refuse_any_unread()
    return Heads(heads.count, kv_count, dim).checked(own)


def _read_ropes(config: ConfigReader, dims: Mapping[bool, int], max_positions: int) -> dict[bool, Rope]:
    """Reads the rope of each kind of layer: True for those with a window. dims: columns of a head by kind."""
    parameters = config.section("rope_parameters") or ConfigReader(DEFAULT_ROPES)
    kinds = {True: ("sliding_attention", 10_000.0), False: ("full_attention", 1_000_000.0)}
    sections = {local: (parameters.section(name), theta) for local, (name, theta) in kinds.items()}
    parameters.refuse_any_unread()
    return {local: rope_from(*sections[local], dim, max_positions) for local, dim in dims.items()}


def _read_sources(config: ConfigReader, windows: Sequence[int]) -> list[int | None]:
    """Finds the layer whose keys and values each layer reads: for upper ones the last layer of their kind below."""
    shared, count = config.read(int, "num_kv_shared_layers", default=0), len(windows)
    if not 0 <= shared < count:
        raise config.error(f"num_kv_shared_layers is {shared}, but there are {count} layers")
    own = count - shared
    last = {bool(windows[layer]): layer for layer in range(own)}
    if missing := {bool(window) for window in windows[own:]} - last.keys():
        kind = "with" if missing.pop() else "without"
        raise config.error(f"num_kv_shared_layers is {shared}, and no layer {kind} a window is below these")
    return [None if layer < own else last[bool(window)] for layer, window in enumerate(windows)]


def _read_experts(config: ConfigReader) -> Experts | None:
    if not config.read(bool, "enable_moe_block", default=False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.read(int, key, default=None)
        return None
    names = ExpertNames(router="router.proj", factors="router.per_expert_scale")
    routing = Routing.read(config, top_keys=("top_k_experts",))
    activation = Experts.read_activation(config, "hidden_activation", default="gelu_pytorch_tanh")
    return Experts(routing, Experts.read_width(config), activation, names=names)


def _with_experts(graph: GraphWriter, x: ir.Value, h: ir.Value, experts: Experts, norm: RmsNorm, name: str) -> ir.Value:
    """Writes the sum of h, the MLP's output, and the experts' output for x; the router has its own norm of x."""
    hidden = width_of(x)
    h = norm.write(graph, h, f"{name}.post_feedforward_layernorm_1")
    scored = replace(norm, scale=hidden**-0.5, weight_name="scale").write(graph, x, f"{name}.router")
    read = norm.write(graph, x, f"{name}.pre_feedforward_layernorm_2")
    mixed = experts.write(graph, read, name, scored)
    return graph.add(h, norm.write(graph, mixed, f"{name}.post_feedforward_layernorm_2"))
