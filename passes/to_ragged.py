"""The one switch of dialect: from one dense sequence [1, T] with past and present to packed tokens [tokens] of many
sequences over KV pools.

Inputs afterwards, INT32: tokens, positions [tokens]; query_start [sequences + 1]; kv_len [sequences]; logit_rows
[logit_rows]; for each KV group g, slots.<g> [tokens] and block_table.<g> [sequences, kv_blocks]. For each layer, in and
out: key_pool.<layer>, value_pool.<layer> [slots.<g>, kv_heads, head_dim], as plugins/kv_write.py has them. Output:
logits [logit_rows, V].
"""

import json
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from enginewright.errors import EngineError
from enginewright.passes.graph import nodes_of, replace, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN
from enginewright.plugins.kv_write import BLOCK_SIZE, KV_WRITE, STORED, pool_dtype
from enginewright.plugins.paged_attention import PAGED_ATTENTION
from enginewright.plugins.rope import ROPE
from enginewright.plugins.target import CPU_TARGET, Target

QUERY_DTYPE = ir.DataType.BFLOAT16
TOKENS, SEQUENCES, LOGIT_ROWS = (ir.SymbolicDim(name) for name in ("tokens", "sequences", "logit_rows"))


@dataclass(frozen=True)
class ToRagged:
    kv_dtype: str = "bf16"  # what the KV pools hold, one of `STORED`
    target: Target = CPU_TARGET
    name: str = "to_ragged"

    def __call__(self, model: ir.Model) -> PassResult:
        stored = STORED[self.kv_dtype]
        return PassResult(_Switch(model, stored, self.target.queries(stored)).run())


@dataclass
class _Switch:
    model: ir.Model
    stored: ir.DataType
    queries: ir.DataType
    inputs: dict[str, ir.Value] = field(default_factory=dict)
    pools: list[ir.Value] = field(default_factory=list)
    written: list[ir.Value] = field(default_factory=list)

    def run(self) -> int:
        graph = self.model.graph
        self._pack_shapes()
        old_inputs = {value.name: value for value in graph.inputs}
        for name in ("tokens", "positions"):
            old_inputs[name].name = None
            ir.convenience.replace_all_uses_with(old_inputs[name], self._input(name, TOKENS))
        for node in nodes_of(self.model, "RotaryEmbedding"):
            self._rotary(node)
        groups = {
            layer: group
            for group, entry in enumerate(json.loads(self.model.metadata_props["enginewright.kv_groups"]))
            for layer in entry["layers"]
        }
        attentions = (*nodes_of(self.model, "Attention"), *nodes_of(self.model, "CausalWindow", domain=DOMAIN))
        layers = {_layer(node): node for node in attentions}
        for layer, node in sorted(layers.items()):
            self._attention(node, layer, groups[layer])
        self._choose_rows()
        graph.inputs[:] = [*self.inputs.values(), *self.pools]
        logits = next(value for value in graph.outputs if value.name == "logits")
        graph.outputs[:] = [logits, *self.written]
        return len(layers)

    def _input(self, name: str, *dims: int | ir.SymbolicDim) -> ir.Value:
        if name not in self.inputs:
            self.inputs[name] = typed(name, ir.DataType.INT32, dims)
        return self.inputs[name]

    def _pack_shapes(self) -> None:
        """[1, T, …] becomes [tokens, …], and so do the shapes that reshapes are given."""
        for node in self.model.graph:
            for value in node.outputs:
                assert value.shape is not None, value.name
                dims = value.shape.dims
                if len(dims) > 1 and dims[0] == 1 and str(dims[1]) == "T":
                    value.shape = ir.Shape((TOKENS, *dims[2:]))
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
            raise EngineError(f"{node.name} rotates neighbours or looks positions up", "Rope does neither")
        rope = ROPE.node(node.inputs[:3], heads=node.attributes["num_heads"].as_int())
        rope.name = node.name
        replace([node], [rope], [(node.outputs[0], rope.outputs[0])])

    def _attention(self, node: ir.Node, layer: int, group: int) -> None:
        q, k, v, *masks = node.inputs[:4] if node.op_type == "Attention" else node.inputs[:3]
        assert q is not None and q.shape is not None
        if node.op_type == "Attention" and (masks != [None] or node.attributes.get_int("is_causal", 0) != 1):
            raise EngineError(
                f"{node.name} has a mask or is not causal", "PagedAttention is causal and has no other mask"
            )
        heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        width = q.shape.dims[-1]
        assert isinstance(width, int)
        shape = {"kv_heads": kv_heads, "head_dim": width // heads}
        slots = ir.SymbolicDim(f"slots.{group}")
        pools = [
            typed(f"{kind}_pool.{layer}", pool_dtype(self.stored), (slots, shape["kv_heads"], shape["head_dim"]))
            for kind in ("key", "value")
        ]
        write = KV_WRITE.node([k, v, *pools, self._input(f"slots.{group}", TOKENS)], **shape, stored=int(self.stored))
        write.name = f"{node.name}.kv_write"
        for pool, output in zip(pools, write.outputs, strict=True):
            output.name = f"{pool.name}.out"
        rounded = typed(f"{q.name}.rounded", QUERY_DTYPE, q.shape.dims)
        cast = standard("Cast", [q], [rounded], str(rounded.name), to=int(QUERY_DTYPE))
        tables = [
            self._input("query_start", ir.SymbolicDim("sequences + 1")),
            self._input("kv_len", SEQUENCES),
            self._input(f"block_table.{group}", SEQUENCES, ir.SymbolicDim("kv_blocks")),
        ]
        attend = PAGED_ATTENTION.node(
            [rounded, *write.outputs, *tables],
            heads=heads,
            **shape,
            scale=node.attributes.get_float("scale", shape["head_dim"] ** -0.5),
            window=node.attributes.get_int("window", 0),
            softcap=node.attributes.get_float("softcap", 0.0),
            block_size=BLOCK_SIZE,
            stored=int(self.stored),
            queries=int(self.queries),
            to=int(ir.DataType.FLOAT),
        )
        attend.name = node.name
        self.pools += pools
        self.written += write.outputs
        graph = self.model.graph
        graph.outputs[:] = [value for value in graph.outputs if value not in node.outputs]
        replace([node], [write, cast, attend], [(node.outputs[0], attend.outputs[0])])

    def _choose_rows(self) -> None:
        """Logits of the wanted rows alone."""
        logits = next(value for value in self.model.graph.outputs if value.name == "logits")
        assert logits.dtype is not None and logits.shape is not None
        logits.name = "logits.all"
        chosen = typed("logits", logits.dtype, (LOGIT_ROWS, *logits.shape.dims[1:]))
        ir.convenience.replace_all_uses_with(logits, chosen, replace_graph_outputs=True)
        rows = self._input("logit_rows", LOGIT_ROWS)
        self.model.graph.append(standard("Gather", [logits, rows], [chosen], "logits", axis=0))


def _layer(node: ir.Node) -> int:
    """The layer of a dense attention, from the name of its past."""
    past = next(value for value in node.inputs if value is not None and str(value.name).startswith("past_key."))
    return int(str(past.name).split(".")[1])
