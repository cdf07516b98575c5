"""Attention, with queries in groups that share a head of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, LayerCache, P, T
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.builder.weights import Weights
from enginewright.plugins.attention.masked_attention import EVERYTHING
from enginewright.plugins.attention.window_attention import WINDOW_ATTENTION
from enginewright.plugins.elementwise.position_scale import POSITION_SCALE
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class Heads:
    """The split of queries, keys and values into heads."""

    count: int  # heads of queries
    kv_count: int  # heads of keys and values, each for count / kv_count heads of queries
    dim: int  # columns of a head

    @staticmethod
    def read(config: ConfigReader, default_dim: int | None = None) -> "Heads":
        """Reads the heads.

        Args:
            config: config of the model.
            default_dim: columns of a head if the config has no head_dim; None is hidden_size / num_attention_heads.
        """
        hidden = config.read_size("hidden_size", maximum=MAX_COLUMNS)
        count = config.read_size("num_attention_heads", maximum=MAX_HEADS)
        dim = config.read_size("head_dim", default=default_dim or max(hidden // count, 1), maximum=MAX_HEAD_DIM)
        kv_count = config.read_size("num_key_value_heads", default=count, maximum=MAX_HEADS)
        return Heads(count, kv_count, dim).checked(config)

    def checked(self, config: ConfigReader) -> "Heads":
        """Returns these heads, checked.

        Raises:
            EngineError: the groups are not equal, or a head does not have an even number of columns.
        """
        if self.count % self.kv_count:
            raise config.error(
                f"num_attention_heads is {self.count}, which is not a multiple of num_key_value_heads, {self.kv_count}"
            )
        if self.dim % 2:
            raise config.error(f"head_dim is {self.dim}: rotary embeddings need an even one")
        return self

    def cut_fused(self, tensor: str) -> dict[str, Sequence[int]]:
        """Returns the rows of q, k and v in one fused tensor, for Weights.cut.

        Args:
            tensor: name of the block, whose q, k and v follow each other in the fused tensor.
        """
        q, kv = self.count * self.dim, self.kv_count * self.dim
        rows = {"q": range(q), "k": range(q, q + kv), "v": range(q + kv, q + 2 * kv)}
        return {f"{tensor}.{part}_proj": part_rows for part, part_rows in rows.items()}

    def cut_gated(self, query: str, gate: str) -> dict[str, Sequence[int]]:
        """Returns the rows of queries and gates in one tensor that has both for each head in turn, for Weights.cut.

        Args:
            query: name of the tensor of queries.
            gate: name of the tensor of gates.
        """
        rows = [range(2 * head * self.dim, 2 * (head + 1) * self.dim) for head in range(self.count)]
        return {
            query: [row for own in rows for row in own[: self.dim]],
            gate: [row for own in rows for row in own[self.dim :]],
        }


@dataclass(frozen=True)
class PositionScale:
    """x · (1 + beta · log(1 + floor(position / original))): plugins/elementwise/position_scale.py."""

    beta: float  # growth of the scale
    original: int  # positions of the original context

    @staticmethod
    def read(rope: ConfigReader, max_positions: int) -> "PositionScale | None":
        """Reads the scale; None if there is none.

        Args:
            rope: parameters of the rope, which contain it.
            max_positions: positions of the model, which the parameters may repeat.
        """
        rope.read_size("max_position_embeddings", default=max_positions)
        beta = rope.read(float, "llama_4_scaling_beta", default=0.0)
        original = rope.read_size("original_max_position_embeddings", default=max_positions)
        return PositionScale(beta, original) if beta else None

    def write(self, graph: GraphWriter, x: ir.Value) -> ir.Value:
        """Writes x, scaled by position."""
        settings = {"beta": self.beta, "original": self.original}
        return graph.plugin(POSITION_SCALE, [x, graph.positions], f"{x.name}.scaled", **settings).outputs[0]


@dataclass(frozen=True)
class Attention:
    """o(attention(q(x), k(x), v(x))). Every field may differ from layer to layer.

    Tensors that a checkpoint fuses (q, k and v; q and a gate) get the names of their parts by `Weights.cut`.
    """

    heads: Heads  # split into heads
    scale: float | None = None  # scale of the scores; None is 1 / √heads.dim
    bias: bool = False  # True if q, k and v have a bias
    output_bias: bool = False  # True if o has a bias
    output_width: int | None = None  # columns of o; None means as many as x
    head_norm: RmsNorm | None = None  # norm of q and of k, before the rotation
    norms_all_heads: bool = False  # True if the norm is over all heads together, not each alone
    norms_rotated: bool = False  # True if the norm comes after the rotation
    norm_names: tuple[str, str] = ("q_norm", "k_norm")  # names of the norms in the checkpoint
    value_norm: RmsNorm | None = None  # norm of each head of v
    keys_are_values: bool = False  # True if v is k before its norm and rotation
    reads: int | None = None  # layer whose keys and values are read; None: this layer has its own
    output_name: str = "o_proj"  # name of o in the checkpoint
    # True if o reads y · sigmoid(gate): q_proj has a query and a gate of the same width for each head
    gated: bool = False
    position_scale: PositionScale | None = None  # scale of queries
    window: int = 0  # sliding window in positions, the query's own included; 0 is no limit
    lookahead: int = 0  # positions after its own that a query attends to; EVERYTHING is all, and 0 is causal
    softcap: float = 0.0  # limit of the scores, ±softcap; 0 is none
    sinks: bool = False  # True if each head has a logit of no position that joins the softmax's sum

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None) -> ir.Value:
        """Writes the attention of a layer.

        Args:
            graph: graph to write into.
            x: input of the layer.
            tensor: name of the block in the checkpoint.
            layer: index of the layer, and of its cache.
            rope: rotation; None: queries and keys have no positions.
        """
        heads = self.heads
        if self.gated:
            graph.weights.cut(f"{tensor}.q_proj", heads.cut_gated(f"{tensor}.q_proj", f"{tensor}.gate_proj"))
        if rope is not None and rope.interleaved:
            self._reorder(graph.weights, tensor, rope)
        q_norm, k_norm = (f"{tensor}.{name}" for name in self.norm_names)
        q = graph.linear(x, f"{tensor}.q_proj", heads.count * heads.dim, self.bias)
        keys_and_values = None if self.reads is not None else self._project(graph, x, tensor)
        if self.position_scale is not None:
            q = self.position_scale.write(graph, q)
        q = self._placed(graph, q, q_norm, rope)
        if keys_and_values is not None:
            k, v = keys_and_values
            k = self._placed(graph, k, k_norm, rope)
            v = v if self.value_norm is None else self.value_norm.write_by_head(graph, v, f"{tensor}.v_norm", heads.dim)
            graph.share(layer, [k, v, *graph.past(layer, LayerCache(heads.kv_count, heads.dim, self.window))])
        sinks = graph.weights.tensor(f"{tensor}.sinks", (heads.count,)) if self.sinks else None
        y = self._attend(graph, q, sinks, layer)
        if self.gated:
            gate = graph.linear(x, f"{tensor}.gate_proj", heads.count * heads.dim, self.bias)
            y = graph.activation("sigmoid", y, f"layers.{layer}.attention.gated", gate)
        return graph.linear(y, f"{tensor}.{self.output_name}", self.output_width or width_of(x), self.output_bias)

    def _project(self, graph: GraphWriter, x: ir.Value, tensor: str) -> tuple[ir.Value, ir.Value]:
        """Writes keys and values, without norms and positions."""
        width = self.heads.kv_count * self.heads.dim
        k = graph.linear(x, f"{tensor}.k_proj", width, self.bias)
        return k, k if self.keys_are_values else graph.linear(x, f"{tensor}.v_proj", width, self.bias)

    def _reorder(self, weights: Weights, tensor: str, rope: RopeTable) -> None:
        """Moves the two rows of each pair of a rope, which are neighbours in the checkpoint, half a head apart."""
        heads = self.heads
        for part, norm, count in zip("qk", self.norm_names, (heads.count, heads.kv_count), strict=True):
            weights.reorder(f"{tensor}.{part}_proj", rope.order(count, heads.dim))
            if self.head_norm is not None:
                weights.reorder(f"{tensor}.{norm}", rope.order(count if self.norms_all_heads else 1, heads.dim))

    def _placed(self, graph: GraphWriter, x: ir.Value, norm: str, rope: RopeTable | None) -> ir.Value:
        """Writes queries or keys with norm and rotation."""
        if not self.norms_rotated:
            x = self._normed(graph, x, norm)
        if rope is not None:
            x = rope.rotate(graph, x, self.heads.dim)
        return self._normed(graph, x, norm) if self.norms_rotated else x

    def _normed(self, graph: GraphWriter, x: ir.Value, norm: str) -> ir.Value:
        if self.head_norm is None:
            return x
        if self.norms_all_heads:
            return self.head_norm.write(graph, x, norm)
        return self.head_norm.write_by_head(graph, x, norm, self.heads.dim)

    def _attend(self, graph: GraphWriter, q: ir.Value, sinks: ir.Value | None, layer: int) -> ir.Value:
        """Writes attention to past and new keys, [1, T, heads.count · heads.dim]."""
        heads, name = self.heads, f"layers.{layer}.attention"
        k, v, *past = graph.shared(layer if self.reads is None else self.reads)
        counts = {"q_num_heads": heads.count, "kv_num_heads": heads.kv_count}
        scores = {"scale": heads.dim**-0.5 if self.scale is None else self.scale, "softcap": self.softcap}
        causal = self.lookahead == 0
        plain = self.reads is None and (causal or self.lookahead == EVERYTHING)
        if self.window or sinks is not None or not plain:
            inputs = [q, k, v, *past] if sinks is None else [q, k, v, *past, sinks]
            sees = {"window": self.window, "lookahead": self.lookahead}
            node = graph.plugin(WINDOW_ATTENTION, inputs, name, **counts, **scores, **sees)
        else:
            dims = [dims_of(q), *[(1, heads.kv_count, P + T, heads.dim)] * 2]
            node = graph.node(
                "Attention", [q, k, v, None, *past], name, dims, **counts, is_causal=int(causal), **scores
            )
        y, key, value = node.outputs
        if self.reads is None:
            graph.present(layer, key, value)
        else:  # the layer that is read outputs them, too
            key.name, value.name = f"{name}.key", f"{name}.value"
        return y
