"""Moves the rotation of queries and keys into the op that writes them for attention, where nothing is in between."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import made_by, nodes_of, only_used_by, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN
from enginewright.plugins.attention.rope_kv_write import ROPE_KV_WRITE
from enginewright.plugins.attention.rope_queries import ROPE_QUERIES
from enginewright.plugins.plugin import int_of


@dataclass(frozen=True)
class FuseRopeKvWrite:
    """Replaces KvWrite by RopeKvWrite, and Rope before the op that rounds queries alone."""

    name: str = "fuse_rope_kv_write"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for attention in nodes_of(model, "PagedAttention", domain=DOMAIN):
            if (queries := made_by(attention.inputs[0], ROPE_QUERIES.name, DOMAIN)) is not None:
                rewrites += _rotate_queries(queries)
                continue
            write = made_by(attention.inputs[0], "KvWrite", DOMAIN)
            assert write is not None, f"{attention.name} has no KvWrite, as ToRagged writes it"
            q, k, *others = write.inputs
            tables: Sequence[ir.Value | None] = (None, None)
            ropes: list[ir.Node] = []
            q_rope, k_rope = made_by(q, "Rope", DOMAIN), made_by(k, "Rope", DOMAIN)
            if q_rope is not None and k_rope is not None:
                if q_rope.inputs[1:] != k_rope.inputs[1:]:
                    refusals.append(f"{attention.name} rotates queries and keys by different angles.")
                elif not all(only_used_by(rope.outputs[0], write) for rope in (q_rope, k_rope)):
                    refusals.append(f"A rotated value of {attention.name} is used elsewhere, too.")
                else:
                    ropes, tables = [q_rope, k_rope], q_rope.inputs[1:]
                    q, k = (rope.inputs[0] for rope in ropes)
            fused = ROPE_KV_WRITE.node(
                [q, k, others[0], *tables, *others[1:]],
                **{name: int_of(write, name) for name in ("heads", "kv_heads", "head_dim", "stored")},
            )
            fused.name = f"{attention.name}.rope_kv_write"
            replace([write, *ropes], [fused], list(zip(write.outputs, fused.outputs, strict=True)))
            rewrites += 1
        return PassResult(rewrites, tuple(refusals))


def _rotate_queries(node: ir.Node) -> bool:
    """Fuses the rotation of queries without keys; returns true if it did."""
    q, _, _, *pools = node.inputs
    rope = made_by(q, "Rope", DOMAIN)
    if rope is None or not only_used_by(rope.outputs[0], node):
        return False
    settings = {name: int_of(node, name) for name in ("heads", "kv_heads", "head_dim", "stored")}
    fused = ROPE_QUERIES.node([*rope.inputs, *pools], **settings)
    fused.name = node.name
    replace([node, rope], [fused], [(node.outputs[0], fused.outputs[0])])
    return True
