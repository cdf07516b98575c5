"""Multi-head latent attention: a token's keys and values are one short vector, which each head expands in its own way.

https://arxiv.org/abs/2405.04434

The weight that expands a head's keys is multiplied into its queries, and the one that expands values into its output:
keys and values are never computed, and the cache only holds latent vectors.
"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.models.blocks.attention import PositionScale
from enginewright.builder.models.blocks.graph import GraphWriter, LayerCache, short
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import RopeTable, latent_score_scale
from enginewright.plugins.attention.latent_attention import LATENT_ATTENTION
from enginewright.plugins.gemm.head_linear import HEAD_LINEAR
from enginewright.plugins.plugin import width_of

NORM = RmsNorm(1e-6)  # of latent vectors and of the queries' low-rank input, whatever epsilon the config has for others
COLUMNS_ALIGN, ROWS_ALIGN = 64, 16  # alignment of a head's weights to cache lines and kernel blocks


@dataclass(frozen=True)
class LatentHeads:
    """The split of queries, keys and values into heads."""

    count: int  # number of heads
    nope_dim: int  # columns of a head's queries and keys that have no position
    rope_dim: int  # columns after these that are rotated; all heads share those of keys
    value_dim: int  # columns of a head's values
    latent_dim: int  # columns of the vector that keys and values are expanded from
    query_rank: int | None = None  # columns of the queries' low-rank input; None: queries are a product of x itself

    @staticmethod
    def read(config: ConfigReader, whole_head: bool | None = False) -> "LatentHeads":
        """Reads the heads.

        Args:
            config: config of the model.
            whole_head: True if `head_dim`, where the config repeats it, is all columns of a head, False if it is the
                rotated ones; None: it is not checked.
        """
        count = config.read_size("num_attention_heads", maximum=MAX_HEADS)
        if (kv_count := config.read_size("num_key_value_heads", default=count, maximum=MAX_HEADS)) != count:
            raise config.error(f"num_key_value_heads is {kv_count}, but each of {count} heads needs its own keys")
        rank = config.read(int, "q_lora_rank", default=None)
        heads = LatentHeads(
            count,
            nope_dim=config.read_size("qk_nope_head_dim", maximum=MAX_HEAD_DIM),
            rope_dim=config.read_size("qk_rope_head_dim", maximum=MAX_HEAD_DIM),
            value_dim=config.read_size("v_head_dim", maximum=MAX_HEAD_DIM),
            latent_dim=config.read_size("kv_lora_rank", maximum=MAX_HEAD_DIM),
            query_rank=None if rank is None else config.read_size("q_lora_rank", maximum=MAX_COLUMNS),
        )
        if heads.rope_dim % 2:
            raise config.error(f"qk_rope_head_dim is {heads.rope_dim}: rotary embeddings need an even one")
        for name, dim, align in (
            ("qk_nope_head_dim", heads.nope_dim, COLUMNS_ALIGN),
            ("kv_lora_rank", heads.latent_dim, COLUMNS_ALIGN),
            ("v_head_dim", heads.value_dim, ROWS_ALIGN),
        ):
            if dim % align:
                raise config.unsupported(f"{name} = {dim}", f"Multiples of {align} are implemented.")
        # Sizes that transformers also writes.
        written = {"qk_head_dim": heads.key_dim}
        if whole_head is not None:
            written["head_dim"] = heads.key_dim if whole_head else heads.rope_dim
        for name, dim in written.items():
            if (given := config.read_size(name, default=dim)) != dim:
                raise config.error(f"{name} is {given}, but the other sizes of a head make it {dim}")
        return heads

    @property
    def key_dim(self) -> int:
        """Columns of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class LatentAttention:
    """o(attention(q(x), latent(x))), as wide as x."""

    heads: LatentHeads  # split into heads
    scale: float  # scale of the scores
    bias: bool = False  # True if the projections of x, and o, have a bias
    position_scale: PositionScale | None = None  # scale of queries

    @staticmethod
    def read(
        config: ConfigReader,
        rope: ConfigReader | None,
        position_scale: PositionScale | None = None,
        whole_head: bool | None = False,
    ) -> "LatentAttention":
        """Reads the block.

        Args:
            config: config of the model.
            rope: parameters of the rope; None: there are none.
            position_scale: scale of queries.
            whole_head: as in LatentHeads.read.
        """
        heads = LatentHeads.read(config, whole_head)
        bias = config.read(bool, "attention_bias", default=False)
        return LatentAttention(heads, heads.key_dim**-0.5 * latent_score_scale(rope), bias, position_scale)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None) -> ir.Value:
        """Writes the attention of a layer.

        Args:
            graph: graph to write into.
            x: input.
            tensor: name of the block in the checkpoint.
            layer: index of the layer, and of its cache.
            rope: rotation.
        """
        assert rope is not None, "a part of each head has a position"
        heads, name = self.heads, short(tensor)
        count, widths = heads.count, [heads.latent_dim, heads.rope_dim]
        nope, rotated = self._queries(graph, x, tensor, rope)
        latent = f"{tensor}.kv_a_proj_with_mqa"
        if rope.interleaved:
            key_order = [heads.latent_dim + row for row in rope.order(1, heads.rope_dim)]
            graph.weights.reorder(latent, [*range(heads.latent_dim), *key_order])
        c, k_rope = graph.split(graph.linear(x, latent, sum(widths), self.bias), f"{name}.latent", *widths)
        c = NORM.write(graph, c, f"{tensor}.kv_a_layernorm")

        expanded = heads.nope_dim + heads.value_dim  # rows of kv_b_proj that a head has: keys, then values
        absorb, expand = f"{tensor}.absorb", f"{tensor}.expand"
        parts = {absorb: (0, heads.nope_dim), expand: (heads.nope_dim, expanded)}
        graph.weights.cut(f"{tensor}.kv_b_proj", {part: _rows(count, expanded, *rows) for part, rows in parts.items()})
        weight = graph.weights.by_head(f"{absorb}.weight", (count * heads.nope_dim, heads.latent_dim), count)
        (q,) = graph.plugin(HEAD_LINEAR, [nope, weight], short(absorb), heads=count).outputs
        past = graph.past(layer, LayerCache(1, sum(widths), window=0, planes=("latent",)))
        inputs = [q, rotated, c, k_rope, rope.cos, rope.sin, *past]
        y, present = graph.plugin(LATENT_ATTENTION, inputs, f"{name}.attention", heads=count, scale=self.scale).outputs
        graph.present(layer, present)
        weight = graph.weights.by_head(f"{expand}.weight", (count * heads.value_dim, heads.latent_dim))
        (values,) = graph.plugin(HEAD_LINEAR, [y, weight], short(expand), heads=count).outputs
        return graph.linear(values, f"{tensor}.o_proj", width_of(x), self.bias)

    def _queries(self, graph: GraphWriter, x: ir.Value, tensor: str, rope: RopeTable) -> tuple[ir.Value, ir.Value]:
        """Writes all heads' columns without a position, and all heads' columns to rotate."""
        heads, projection = self.heads, f"{tensor}.q_proj"
        if heads.query_rank is not None:
            x = graph.linear(x, f"{tensor}.q_a_proj", heads.query_rank, self.bias)
            x = NORM.write(graph, x, f"{tensor}.q_a_layernorm")
            projection = f"{tensor}.q_b_proj"
        if self.position_scale is not None:  # scaling the input of a product without a bias is the same
            x = self.position_scale.write(graph, x)
        nope, rotated = f"{projection}.nope", f"{projection}.rope"
        rope_rows = _rows(heads.count, heads.key_dim, heads.nope_dim, heads.key_dim)
        parts = {
            nope: _rows(heads.count, heads.key_dim, 0, heads.nope_dim),
            rotated: [rope_rows[row] for row in rope.order(heads.count, heads.rope_dim)],
        }
        graph.weights.cut(projection, parts)
        return (
            graph.linear(x, nope, heads.count * heads.nope_dim),
            graph.linear(x, rotated, heads.count * heads.rope_dim),
        )


def _rows(heads: int, each: int, begin: int, end: int) -> list[int]:
    """Lists rows begin … end - 1 of each head of `each` rows."""
    return [head * each + row for head in range(heads) for row in range(begin, end)]
