"""Rotation of queries and keys and the write into the KV pools become one."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import made_by, nodes_of, only_used_by, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN
from enginewright.plugins.rope_kv_write import ROPE_KV_WRITE


@dataclass(frozen=True)
class FuseRopeKvWrite:
    name: str = "fuse_rope_kv_write"

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for attention in nodes_of(model, "PagedAttention", domain=DOMAIN):
            rounding = made_by(attention.inputs[0], "Cast")
            q_rope = made_by(rounding.inputs[0], "Rope", DOMAIN) if rounding is not None else None
            write = made_by(attention.inputs[1], "KvWrite", DOMAIN)
            k_rope = made_by(write.inputs[0], "Rope", DOMAIN) if write is not None else None
            if rounding is None or q_rope is None or write is None or k_rope is None:
                refusals.append(f"{attention.name} attends to queries or keys that are not rotated.")
                continue
            if q_rope.inputs[1:] != k_rope.inputs[1:]:
                refusals.append(f"{attention.name} rotates queries and keys by different angles.")
                continue
            if not (only_used_by(q_rope.outputs[0], rounding) and only_used_by(k_rope.outputs[0], write)):
                refusals.append(f"A rotated value of {attention.name} is used elsewhere, too.")
                continue
            fused = ROPE_KV_WRITE.node(
                [q_rope.inputs[0], k_rope.inputs[0], write.inputs[1], *q_rope.inputs[1:], *write.inputs[2:]],
                heads=q_rope.attributes["heads"].as_int(),
                kv_heads=k_rope.attributes["heads"].as_int(),
                head_dim=write.attributes["head_dim"].as_int(),
                stored=write.attributes["stored"].as_int(),
            )
            fused.name = f"{attention.name}.rope_kv_write"
            old = [write, rounding, q_rope, k_rope]
            values = (rounding.outputs[0], *write.outputs)
            replace(old, [fused], list(zip(values, fused.outputs, strict=True)))
            rewrites += 1
        return PassResult(rewrites, tuple(refusals))
