"""Converts a dense graph [1, T] with past and present to packed tokens of many sequences over KV pools.

No other pass changes the form of the graph. Afterwards, it has these inputs, in INT32, as far as its ops read them:

- tokens, positions, token_types [tokens]; query_start [sequences + 1]; kv_len [sequences]; logit_rows [logit_rows];
  first_rows [sequences], the row of each text's first token;
- for each KV group g, slots.<g> [tokens] and block_table.<g> [sequences, kv_blocks];
- for each group g of recurrent states, which follow the KV groups, state_slots.<g> [sequences].

For each layer, it has these inputs, and outputs of the same shape: key_pool.<layer> and value_pool.<layer> [slots.<g>,
kv_heads, head_dim], as in plugins/attention/kv_write.py, or the layer's states by their names, such as
conv_pool.<layer> [state_slots.<g>, …]. The main output is logits [logit_rows, V], or a row for each text in an
embedding model. Hidden states, as inputs or outputs, are FLOAT [tokens, columns].
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from enginewright.embedding import RESULTS
from enginewright.errors import EngineError, UsageError
from enginewright.passes.graph import nodes_of, replace, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.plan import HIDDEN, HIDDEN_BEFORE
from enginewright.plugins import DOMAIN, plugin_of
from enginewright.plugins.attention.kv_write import BLOCK_SIZE, KV_WRITE, STORED, pool_dtype
from enginewright.plugins.attention.latent_paged_attention import LATENT_PAGED_ATTENTION
from enginewright.plugins.attention.latent_write import LATENT_WRITE
from enginewright.plugins.attention.masked_attention import EVERYTHING
from enginewright.plugins.attention.paged_attention import PAGED_ATTENTION
from enginewright.plugins.attention.rope import ROPE
from enginewright.plugins.attention.rope_queries import ROPE_QUERIES
from enginewright.plugins.elementwise.mean_rows import MEAN_ROWS
from enginewright.plugins.experts.route import renamed
from enginewright.plugins.plugin import width_of
from enginewright.plugins.recurrence.recurrence import STATE_INPUTS
from enginewright.plugins.target import CPU_TARGET, Target

PAST_STATE = re.compile(r"past_(?P<part>\w+)\.(?P<layer>\d+)")
TOKENS, SEQUENCES, LOGIT_ROWS = (ir.SymbolicDim(name) for name in ("tokens", "sequences", "logit_rows"))


@dataclass(frozen=True)
class ToRagged:
    """Rewrites a dense graph for packed tokens."""

    kv_dtype: str = "bf16"  # dtype of the KV pools, one of `STORED`
    target: Target = CPU_TARGET  # target, which decides the dtype of queries
    name: str = "to_ragged"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        stored = STORED[self.kv_dtype]
        return PassResult(_Switch(model, stored, self.target.queries(stored)).run())


@dataclass
class _Switch:
    """One run of the pass over a model."""

    model: ir.Model  # the graph
    stored: ir.DataType  # dtype of the KV pools
    queries: ir.DataType  # dtype of queries
    inputs: dict[str, ir.Value] = field(default_factory=dict)  # name → new input
    pools: list[ir.Value] = field(default_factory=list)  # pools, as inputs
    written: list[ir.Value] = field(default_factory=list)  # pools, as outputs

    def run(self) -> int:
        graph = self.model.graph
        pools = tuple(nodes_of(self.model, "Pool", domain=DOMAIN))
        self._pack_shapes(_rows_of(pools))
        old_inputs = {value.name: value for value in graph.inputs}
        for name in [name for name in ("tokens", "positions", "token_types") if name in old_inputs]:
            old_inputs[name].name = None
            ir.convenience.replace_all_uses_with(old_inputs[name], self._input(name, TOKENS))
        for node in nodes_of(self.model, "RotaryEmbedding"):
            self._rotary(node)
        kv, states = (json.loads(self.model.metadata_props[f"enginewright.{kind}_groups"]) for kind in ("kv", "state"))
        groups = {layer: group for group, entry in enumerate(kv) for layer in entry["layers"]}
        state_groups = {layer: group for group, entry in enumerate(states, len(kv)) for layer in entry["layers"]}
        attentions = (*nodes_of(self.model, "Attention"), *nodes_of(self.model, "WindowAttention", domain=DOMAIN))
        writers = {_layer(node): node for node in attentions if any(value.is_graph_output() for value in node.outputs)}
        for layer, node in sorted(writers.items()):
            self._attention(node, layer, groups[layer])
        readers = [node for node in attentions if node not in writers.values()]
        for node in readers:
            self._attention(node, layer := _layer(node), groups[layer], reads=True)
        latent = {_layer(node): node for node in nodes_of(self.model, "LatentAttention", domain=DOMAIN)}
        for layer, node in sorted(latent.items()):
            self._latent_attention(node, layer, groups[layer])
        recurrences = {self._recurrence(node, state_groups) for node in tuple(graph)} - {None}
        for node in pools:
            self._pool(node)
        if not pools:
            self._choose_rows()
        hidden_before = [value for value in graph.inputs if value.name == HIDDEN_BEFORE]
        graph.inputs[:] = [*self.inputs.values(), *hidden_before, *self.pools]
        results = [value for value in graph.outputs if value.name in ("logits", HIDDEN, *RESULTS)]
        graph.outputs[:] = [*results, *self.written]
        return len(attentions) + len(latent) + len(recurrences)

    def _input(self, name: str, *dims: int | ir.SymbolicDim) -> ir.Value:
        if name not in self.inputs:
            self.inputs[name] = typed(name, ir.DataType.INT32, dims)
        return self.inputs[name]

    def _pack_shapes(self, pooled: ir.SymbolicDim) -> None:
        """Replaces [1, T, …] by [tokens, …] and [1, S, …] by [pooled, …], also in the shapes of reshapes."""
        packed = {"T": TOKENS, "S": pooled}
        hidden_before = [value for value in self.model.graph.inputs if value.name == HIDDEN_BEFORE]
        for values in (hidden_before, *(node.outputs for node in self.model.graph)):
            for value in values:
                assert value.shape is not None, value.name
                dims = value.shape.dims
                if len(dims) > 1 and dims[0] == 1 and str(dims[1]) in packed:
                    value.shape = ir.Shape((packed[str(dims[1])], *dims[2:]))
                else:  # rows that are sorted by expert
                    value.shape = ir.Shape([renamed(size, "T", TOKENS) for size in dims])
        for node in nodes_of(self.model, "Reshape"):
            (output,) = node.outputs
            assert output.shape is not None
            wanted = np.array([0, *output.shape.dims[1:]], np.int64)
            name = f"{node.name}.shape"
            shape = typed(name, ir.DataType.INT64, (len(wanted),))
            shape.const_value = ir.tensor(wanted, name=name)
            self.model.graph.register_initializer(shape)
            node.replace_input_with(1, shape)

    def _rotary(self, node: ir.Node) -> None:
        if len(node.inputs) > 3 or node.attributes.get_int("interleaved", 0) != 0:
            raise EngineError(f"{node.name} rotates adjacent columns or looks positions up", "Rope does neither")
        rope = ROPE.node(node.inputs[:3], heads=node.attributes["num_heads"].as_int())
        rope.name = node.name
        replace([node], [rope], [(node.outputs[0], rope.outputs[0])])

    def _attention(self, node: ir.Node, layer: int, group: int, reads: bool = False) -> None:
        """Replaces a dense attention by KvWrite and PagedAttention.

        Args:
            node: the attention.
            layer: layer whose keys and values it reads.
            group: KV group of that layer.
            reads: True if another attention writes them, and this one only reads them.
        """
        q, k, v, *masks = node.inputs[:4] if node.op_type == "Attention" else node.inputs[:3]
        sinks = node.inputs[5:] if node.op_type == "WindowAttention" else ()
        assert q is not None and q.shape is not None
        if node.op_type == "Attention" and masks != [None]:
            raise EngineError(f"{node.name} has a mask", "PagedAttention has a window and no other mask")
        causal = node.op_type == "WindowAttention" or node.attributes.get_int("is_causal", 0) == 1
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width = q.shape.dims[-1]
        assert isinstance(width, int)
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": width // heads}
        if reads:
            written = [
                value for value in self.written if value.name in (f"key_pool.{layer}.out", f"value_pool.{layer}.out")
            ]
            write = ROPE_QUERIES.node([q, None, None, *written], **shape, stored=int(self.stored))
            write.name = f"{node.name}.queries"
        else:
            slots = ir.SymbolicDim(f"slots.{group}")
            pools = [
                typed(f"{kind}_pool.{layer}", pool_dtype(self.stored), (slots, shape["kv_heads"], shape["head_dim"]))
                for kind in ("key", "value")
            ]
            slot = self._input(f"slots.{group}", TOKENS)
            write = KV_WRITE.node([q, k, v, *pools, slot], **shape, stored=int(self.stored))
            write.name = f"{node.name}.kv_write"
            written = list(write.outputs[1:])
            for pool, output in zip(pools, written, strict=True):
                output.name = f"{pool.name}.out"
            self.pools += pools
            self.written += written
        rounded = write.outputs[0]
        rounded.name = f"{q.name}.rounded"
        attend = PAGED_ATTENTION.node(
            [rounded, *written, *self._tables(group), *sinks],
            **shape,
            scale=node.attributes.get_float("scale", shape["head_dim"] ** -0.5),
            window=node.attributes.get_int("window", 0),
            lookahead=node.attributes.get_int("lookahead", 0) if causal else EVERYTHING,
            softcap=node.attributes.get_float("softcap", 0.0),
            block_size=BLOCK_SIZE,
            stored=int(self.stored),
            queries=int(self.queries),
            to=int(ir.DataType.FLOAT),
        )
        attend.name = node.name
        graph = self.model.graph
        graph.outputs[:] = [value for value in graph.outputs if value not in node.outputs]
        replace([node], [write, attend], [(node.outputs[0], attend.outputs[0])])

    def _latent_attention(self, node: ir.Node, layer: int, group: int) -> None:
        if self.stored != ir.DataType.BFLOAT16:
            raise UsageError(
                f"{node.name} caches latent vectors, which are stored as bf16 only",
                "all heads expand keys and values from them, so further rounding would cost too much quality",
                "Leave --kv-cache-dtype out.",
            )
        q, q_rope, c, k_rope, cos, sin, past = node.inputs
        assert past is not None and past.shape is not None and c is not None
        width, heads = past.shape.dims[-1], node.attributes["heads"].as_int()
        assert isinstance(width, int)
        pool = typed(f"latent_pool.{layer}", self.stored, (ir.SymbolicDim(f"slots.{group}"), 1, width))
        slots = self._input(f"slots.{group}", TOKENS)
        write = LATENT_WRITE.node([q, q_rope, c, k_rope, cos, sin, pool, slots], heads=heads)
        write.name = f"{node.name}.latent_write"
        queries, written = write.outputs
        queries.name, written.name = f"{node.name}.queries", f"{pool.name}.out"
        attend = LATENT_PAGED_ATTENTION.node(
            [queries, written, *self._tables(group)],
            heads=heads,
            head_dim=width,
            value_dim=width_of(c),
            scale=node.attributes["scale"].as_float(),
            block_size=BLOCK_SIZE,
            to=int(ir.DataType.FLOAT),
        )
        attend.name = node.name
        self.pools.append(pool)
        self.written.append(written)
        graph = self.model.graph
        graph.outputs[:] = [value for value in graph.outputs if value not in node.outputs]
        replace([node], [write, attend], [(node.outputs[0], attend.outputs[0])])

    def _tables(self, group: int) -> list[ir.Value]:
        """Returns the inputs that place sequences in a step and in the pools of a group."""
        return [
            self._input("query_start", ir.SymbolicDim("sequences + 1")),
            self._input("kv_len", SEQUENCES),
            self._input(f"block_table.{group}", SEQUENCES, ir.SymbolicDim("kv_blocks")),
        ]

    def _recurrence(self, node: ir.Node, groups: Mapping[int, int]) -> int | None:
        """Gives an op with a state the pool of all states in place of its past; returns the op's layer."""
        plugin = plugin_of(node)
        if plugin is None or plugin.inputs[-len(STATE_INPUTS) :] != STATE_INPUTS:
            return None
        place = len(plugin.inputs) - len(STATE_INPUTS)
        past = node.inputs[place]
        assert past is not None and past.shape is not None and past.dtype is not None
        found = PAST_STATE.fullmatch(str(past.name))
        assert found is not None, f"{past.name} is not the name of a past"
        group = groups[int(found["layer"])]
        dims = (ir.SymbolicDim(f"state_slots.{group}"), *past.shape.dims[1:])
        pool = typed(f"{found['part']}_pool.{found['layer']}", past.dtype, dims)
        tables = [
            self._input("query_start", ir.SymbolicDim("sequences + 1")),
            self._input(f"state_slots.{group}", SEQUENCES),
            self._input("kv_len", SEQUENCES),
        ]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        stepped = plugin.node([*node.inputs[:place], pool, *tables], **attributes)
        stepped.name = node.name
        (state, *_), (old, *_) = stepped.outputs, node.outputs
        state.name = f"{pool.name}.out"
        self.pools.append(pool)
        self.written.append(state)
        graph = self.model.graph
        graph.outputs[:] = [value for value in graph.outputs if value is not old]
        replace([node], [stepped], [*zip(node.outputs[1:], stepped.outputs[1:], strict=True)])
        return int(found["layer"])

    def _pool(self, node: ir.Node) -> None:
        """Replaces a Pool by a Gather of the first or last rows of texts, or by MeanRows of each text in the step."""
        x, pooling = node.inputs[0], node.attributes["pooling"].as_string()
        assert x is not None and x.dtype is not None and x.shape is not None
        if pooling == "mean":
            mean = MEAN_ROWS.node([x, self._input("query_start", ir.SymbolicDim("sequences + 1"))])
            mean.name = node.name
            replace([node], [mean], [(node.outputs[0], mean.outputs[0])])
            return
        rows = self._input(f"{'first' if pooling == 'first' else 'logit'}_rows", _rows_of([node]))
        chosen = typed(str(node.name), x.dtype, (_rows_of([node]), *x.shape.dims[1:]))
        replace([node], [standard("Gather", [x, rows], [chosen], str(node.name), axis=0)], [(node.outputs[0], chosen)])

    def _choose_rows(self) -> None:
        """Computes logits of the requested rows only."""
        logits = next(value for value in self.model.graph.outputs if value.name == "logits")
        assert logits.dtype is not None and logits.shape is not None
        logits.name = "logits.all"
        chosen = typed("logits", logits.dtype, (LOGIT_ROWS, *logits.shape.dims[1:]))
        ir.convenience.replace_all_uses_with(logits, chosen, replace_graph_outputs=True)
        rows = self._input("logit_rows", LOGIT_ROWS)
        self.model.graph.append(standard("Gather", [logits, rows], [chosen], "logits", axis=0))


def _rows_of(pools: Sequence[ir.Node]) -> ir.SymbolicDim:
    """Returns the dimension of pooled rows.

    For last rows, it is the number of texts that end in the step, since the last row of an earlier chunk is not pooled.
    """
    return LOGIT_ROWS if any(node.attributes["pooling"].as_string() == "last" for node in pools) else SEQUENCES


def _layer(node: ir.Node) -> int:
    """Returns the layer of a dense attention, from the name of its past."""
    past = next(value for value in node.inputs if value is not None and str(value.name).startswith("past_"))
    return int(str(past.name).split(".")[1])
