"""Causal attention, with queries in groups that share a head of keys and values."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, MOST_HEAD_DIM, MOST_HEADS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, LayerCache, P, T
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.plugins.causal_window import CAUSAL_WINDOW
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class Heads:
    """How queries, keys and values are cut."""

    count: int  # of queries
    kv_count: int  # of keys and values, each for count / kv_count heads of queries
    dim: int  # columns of a head

    @staticmethod
    def read(config: ConfigReader, default_dim: int | None = None) -> "Heads":
        """Without a default, a head_dim that is not given is hidden_size / num_attention_heads."""
        hidden = config.read_size("hidden_size", most=MOST_COLUMNS)
        count = config.read_size("num_attention_heads", most=MOST_HEADS)
        dim = config.read_size("head_dim", default=default_dim or max(hidden // count, 1), most=MOST_HEAD_DIM)
        kv_count = config.read_size("num_key_value_heads", default=count, most=MOST_HEADS)
        if count % kv_count:
            raise config.error(f"num_attention_heads is {count}, no multiple of num_key_value_heads, {kv_count}")
        if dim % 2:
            raise config.error(f"head_dim is {dim}: rotary embeddings need an even one")
        return Heads(count, kv_count, dim)


@dataclass(frozen=True)
class Attention:
    """o(attention(q(x), k(x), v(x))), as wide as x. Every field may differ from layer to layer."""

    heads: Heads
    scale: float | None = None  # of the scores; None is 1 / √heads.dim
    bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    head_norm: RmsNorm | None = None  # of each head of q and of k, before they are rotated
    window: int = 0  # positions that a query sees, its own included; 0 is all
    softcap: float = 0.0  # scores stay within ±softcap; 0 is no limit

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable) -> ir.Value:
        """layer: whose cache it is."""
        q, k, v = (
            graph.linear(x, f"{tensor}.{part}_proj", count * self.heads.dim, self.bias)
            for part, count in (("q", self.heads.count), ("k", self.heads.kv_count), ("v", self.heads.kv_count))
        )
        q = self._placed(graph, q, f"{tensor}.q_norm", rope)
        k = self._placed(graph, k, f"{tensor}.k_norm", rope)
        y = self._attend(graph, q, k, v, layer)
        return graph.linear(y, f"{tensor}.o_proj", width_of(x), self.output_bias)

    def _placed(self, graph: GraphWriter, x: ir.Value, norm: str, rope: RopeTable) -> ir.Value:
        """Queries or keys with their positions in them."""
        if self.head_norm is not None:
            x = self.head_norm.write_by_head(graph, x, norm, self.heads.dim)
        return rope.rotate(graph, x, self.heads.dim)

    def _attend(self, graph: GraphWriter, q: ir.Value, k: ir.Value, v: ir.Value, layer: int) -> ir.Value:
        """To the past and the new keys: [1, T, heads.count · heads.dim]."""
        heads, name = self.heads, f"layers.{layer}.attention"
        counts = {"q_num_heads": heads.count, "kv_num_heads": heads.kv_count}
        scores = {"scale": heads.dim**-0.5 if self.scale is None else self.scale, "softcap": self.softcap}
        past = graph.past(layer, LayerCache(heads.kv_count, heads.dim, self.window))
        if self.window:
            node = graph.plugin(CAUSAL_WINDOW, [q, k, v, *past], name, **counts, **scores, window=self.window)
        else:
            dims = [dims_of(q), *[(1, heads.kv_count, P + T, heads.dim)] * 2]
            node = graph.node("Attention", [q, k, v, None, *past], name, dims, **counts, is_causal=1, **scores)
        y, key, value = node.outputs
        graph.present(layer, key, value)
        return y
