"""Nodes of every op of ours, with values for their inputs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from enginewright.plugins import DOMAIN, PLUGINS, Plugin
from enginewright.plugins.attention.kv_write import STORED as KV_STORED
from enginewright.plugins.attention.kv_write import pool_dtype
from enginewright.plugins.attention.masked_attention import EVERYTHING
from enginewright.plugins.elementwise.pool import POOLINGS
from enginewright.plugins.plugin import CODES
from tests.helpers.onnx_run import Array

GEMM_CODES = tuple(code for code, dtype in CODES.items() if dtype.in_r16)  # that rows become for products
FLOAT, BFLOAT16, FP8 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN
INT8, INT32, INT64, UINT8 = ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8
Operand = tuple[ir.DataType, tuple[int | str, ...]]
# What symbolic dimensions are when a graph is run. A block has 4 slots.
SIZES = {"T": 5, "P": 3, "tokens": 7, "slots": 24, "sequences": 2, "sequences + 1": 3, "kv_blocks": 2}
SIZES |= {"S": 1, "P + T": 8, "states": 4, "3 * T": 15, "3 * tokens": 21}
ONE = {
    **SIZES,
    "T": 1,
    "P": 0,
    "tokens": 1,
    "sequences": 1,
    "sequences + 1": 2,
    "P + T": 1,
    "3 * T": 3,
    "3 * tokens": 3,
}
INDICES: Mapping[str, Sequence[int]] = {  # values that must be in range, or fit each other
    "slots": [23, 4, 9, 0, 17, 5, 12],
    "query_start": [0, 3, 7],
    "kv_len": [5, 8],
    "block_table": [4, 1, 5, 2],
    "state_slots": [2, 0],
    "columns": [10, 0, 3, 3, 7, 1, 9, 2, 8, 5, 4, 6, -1, 10, -1, 2, 9],
    "places": [4, 9, 20, 0, 10, 14, 1, 11, 15, 5, 12, 16, 2, 6, 17, 3, 7, 18, 8, 13, 19],
    "starts": [0, 9, 9, 14, 21],  # one expert has no rows
}
INDICES_OF_ONE: Mapping[str, Sequence[int]] = {
    **INDICES,
    "query_start": [0, 1],
    "kv_len": [1],
    "places": [2, 0, 1],
    "starts": [0, 1, 1, 2, 3],
}


@dataclass(frozen=True)
class Case:
    """A node: its operands by the names of the schema (absent ones left out), and its attributes."""

    op: str
    operands: Mapping[str, Operand]
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def plugin(self) -> Plugin:
        return PLUGINS[self.op]

    def inputs(self) -> list[ir.Value | None]:
        given = [
            ir.Value(name=name, type=ir.TensorType(found[0]), shape=ir.Shape(found[1])) if found else None
            for name, found in ((name, self.operands.get(name)) for name in (n.rstrip("?") for n in self.plugin.inputs))
        ]
        while given[-1] is None:
            given.pop()
        return given

    def node(self) -> ir.Node:
        node = self.plugin.node(self.inputs(), **self.attributes)
        node.name = "it"
        for index, output in enumerate(node.outputs):
            output.name = f"out.{index}"
        return node


def _norm(to: ir.DataType) -> dict[str, int | float | str]:
    return {"epsilon": 1e-6, "to": int(to), "group": 0}


def _gemms() -> list[Case]:
    cases = []
    for op, x, dtype in (
        ("GemmBf16", BFLOAT16, BFLOAT16),
        ("GemmW8A16", BFLOAT16, INT8),
        ("GemmFp8A16", BFLOAT16, FP8),
    ):
        scale = {} if dtype == BFLOAT16 else {"scale": (FLOAT, (22,))}
        for epilogue in ("none", "swiglu", "geglu"):
            for to in (FLOAT, BFLOAT16):
                for bias in ({}, {"bias": (FLOAT, (22,))}):
                    for rows in (("tokens",), (1, "T")):
                        operands = {"x": (x, (*rows, 13)), "weight": (dtype, (22, 13)), **scale, **bias}
                        group = {"group": 0} if dtype == FP8 else {}
                        cases.append(Case(op, operands, {"epilogue": epilogue, "to": int(to), **group}))
    for epilogue, bias in (("none", {}), ("swiglu", {"bias": (FLOAT, (22,))})):  # runs of 32 columns, and a shorter one
        operands = {"x": (BFLOAT16, ("tokens", 77)), "weight": (FP8, (22, 77)), "scale": (FLOAT, (22, 3)), **bias}
        cases.append(Case("GemmFp8A16", operands, {"epilogue": epilogue, "to": int(FLOAT), "group": 32}))
    return cases


def _gemms_in_runs() -> list[Case]:
    """Runs of 32 columns and a shorter one, or one of all."""
    cases = []
    for rows, epilogue, to, (group, runs) in itertools.product(
        (("tokens",), (1, "T")), ("none", "swiglu"), (FLOAT, BFLOAT16), ((0, 1), (32, 3))
    ):
        attributes = {"epilogue": epilogue, "to": int(to), "group": group}
        x: dict[str, Operand] = {"x": (INT8, (*rows, 77)), "x_scale": (FLOAT, (*rows, runs))}
        for bias in ({}, {"bias": (FLOAT, (22,))}):
            eight: dict[str, Operand] = {"weight": (INT8, (22, 77)), "scale": (FLOAT, (22,))}
            cases.append(Case("GemmW8A8", {**x, **eight, **bias}, attributes))
            of_weight: dict[str, Operand] = {
                "weight": (FP8, (22, 77)),
                "scale": (FLOAT, (22, runs) if group else (22,)),
            }
            cases.append(Case("GemmFp8A8", {**x, "x": (FP8, (*rows, 77)), **of_weight, **bias}, attributes))
            four: dict[str, Operand] = {"weight": (UINT8, (22, 77)), "scale": (BFLOAT16, (22, runs))}
            zeros: dict[str, Operand] = {"zero": (INT8, (22, runs))} if bias else {}
            cases.append(Case("GemmW4A8", {**x, **four, **zeros, **bias}, attributes))
            cases.append(Case("GemmMxfp4A8", {**x, **four, **bias}, attributes))
            rounded: dict[str, Operand] = {"x": (BFLOAT16, (*rows, 77))}
            cases.append(Case("GemmW4A16", {**rounded, **four, **zeros, **bias}, attributes))
            cases.append(Case("GemmMxfp4A16", {**rounded, **four, **bias}, attributes))
    return cases


HEADS = {"heads": 6, "kv_heads": 3, "head_dim": 10}
SEEN = {**HEADS, "scale": 0.3, "block_size": 4}
STORED = tuple(KV_STORED.values())


def _pools(stored: ir.DataType) -> dict[str, Operand]:
    return dict.fromkeys(("key_pool", "value_pool"), (pool_dtype(stored), ("slots", 3, 10)))


ROWS: Operand = (FLOAT, ("tokens", 11))
NEW: dict[str, Operand] = {"k": (FLOAT, ("tokens", 30)), "v": (FLOAT, ("tokens", 30))}
SLOTS: dict[str, Operand] = {"slots": (INT32, ("tokens",))}
SINKS: dict[str, Operand] = {"sinks": (FLOAT, (6,))}
PAGED: dict[str, Operand] = {
    "q": (BFLOAT16, ("tokens", 60)),
    "query_start": (INT32, ("sequences + 1",)),
    "kv_len": (INT32, ("sequences",)),
    "block_table": (INT32, ("sequences", "kv_blocks")),
}
PAST: dict[str, Operand] = {
    "q": (FLOAT, (1, "T", 60)),
    "k": (FLOAT, (1, "T", 30)),
    "v": (FLOAT, (1, "T", 30)),
    "past_key": (FLOAT, (1, 3, "P", 10)),
    "past_value": (FLOAT, (1, 3, "P", 10)),
}


# Where tokens are of several sequences with a state each, and where they are of one.
PACKED_STATE: dict[str, Operand] = {"query_start": (INT32, ("sequences + 1",)), "slots": (INT32, ("sequences",))}


def _convolutions() -> list[Case]:
    cases = []
    for rows, states, slots in ((("tokens",), "states", PACKED_STATE), ((1, "T"), 1, {})):
        x: Operand = (FLOAT, (*rows, 11))
        for width, more in ((3, ("before", "behind")), (4, ("bias",)), (2, ()), (4, ("bias", "before"))):
            operands = {"x": x, "taps": (FLOAT, (11, width)), **dict.fromkeys(more, x), **slots}
            operands["state"] = (FLOAT, (states, width - 1, 11))
            if "bias" in more:
                operands["bias"] = (FLOAT, (11,))
            for activation, to in (("silu", FLOAT), ("none", BFLOAT16)):
                cases.append(Case("CausalConv", operands, {"activation": activation, "to": int(to)}))
    return cases


def _delta_rules() -> list[Case]:
    return [
        Case(
            "GatedDelta",
            {
                **dict.fromkeys(("query", "key"), (FLOAT, (*rows, key_heads * 5))),
                "value": (FLOAT, (*rows, 6 * 7)),
                "decay": (FLOAT, (*rows, 6 * decays)),
                "beta": (FLOAT, (*rows, 6)),
                "log_a": (FLOAT, (6,)),
                "dt_bias": (FLOAT, (6 * decays,)),
                "state": (FLOAT, (states, 6, 5, 7)),
                **slots,
            },
            {"heads": 6, "key_heads": key_heads, "scale": 0.4, "epsilon": 1e-6},
        )
        for rows, states, slots in ((("tokens",), "states", PACKED_STATE), ((1, "T"), 1, {}))
        for key_heads, decays in ((2, 1), (6, 1), (6, 5))
    ]


def _selective_states() -> list[Case]:
    return [
        Case(
            "SelectiveState",
            {
                **dict.fromkeys(("query", "key"), (FLOAT, (*rows, key_heads * 5))),
                "value": (FLOAT, (*rows, 6 * 7)),
                "decay": (FLOAT, (*rows, 6)),
                **dict.fromkeys(("log_a", "dt_bias", "skip"), (FLOAT, (6,))),
                "state": (FLOAT, (states, 6, 5, 7)),
                **slots,
            },
            {"heads": 6, "key_heads": key_heads, "dt_min": dt_min},
        )
        for rows, states, slots in ((("tokens",), "states", PACKED_STATE), ((1, "T"), 1, {}))
        for key_heads, dt_min in ((2, 0.0), (6, 0.5))
    ]


def _tables(rotary: int) -> dict[str, Operand]:
    return {"cos": (FLOAT, ("tokens", rotary // 2)), "sin": (FLOAT, ("tokens", rotary // 2))}


# Latent attention: 3 heads, latent vectors of 10 columns, and 4 that are rotated.
LATENT: dict[str, Operand] = {
    "q": (FLOAT, ("tokens", 30)),
    "q_rope": (FLOAT, ("tokens", 12)),
    "c": (FLOAT, ("tokens", 10)),
    "k_rope": (FLOAT, ("tokens", 4)),
}
LATENT_POOL: dict[str, Operand] = {"latent_pool": (BFLOAT16, ("slots", 1, 14))}


def _of_one_text(operands: Mapping[str, Operand]) -> dict[str, Operand]:
    """The operands with the tokens of one sequence in place of a step's."""
    return {name: (dtype, (1, "T", *dims[1:])) for name, (dtype, dims) in operands.items()}


ROUTING: dict[str, int | float | str] = {
    "top": 3,
    "scores": "softmax",
    "groups": 1,
    "chosen_groups": 1,
    "group_best": 2,
    "normalized": 1,
    "scale": 1.0,
}


def _routes() -> list[Case]:
    cases = []
    for rows in (("tokens",), (1, "T")):
        x: dict[str, Operand] = {"x": (FLOAT, (*rows, 11)), "weight": (FLOAT, (12, 11))}
        vector: Operand = (FLOAT, (12,))
        rounded: dict[str, Operand] = {**x, "weight": (BFLOAT16, (12, 11))}
        grouped = {"scores": "sigmoid", "groups": 4, "chosen_groups": 2, "scale": 2.5}
        cases.append(Case("Route", x, ROUTING))
        cases.append(Case("Route", {**rounded, "bias": vector}, {**ROUTING, "normalized": 0}))
        cases.append(Case("Route", {**x, "correction": vector}, {**ROUTING, **grouped}))
        cases.append(Case("Route", {**rounded, "bias": vector, "correction": vector}, {**ROUTING, "group_best": 1}))
    return cases


def _products_of_experts() -> list[Case]:
    """Cases of products with four experts, one of which has no rows."""
    cases, starts = [], {"starts": (INT32, (1, 5))}
    eights: dict[str, Operand] = {"weight": (INT8, (40, 45)), "scale": (FLOAT, (40,))}
    fours: dict[str, Operand] = {"weight": (UINT8, (40, 45)), "scale": (BFLOAT16, (40, 2)), "zero": (INT8, (40, 2))}
    codes: dict[str, Operand] = {"x": (INT8, ("3 * tokens", 45)), "x_scale": (FLOAT, ("3 * tokens", 2))}
    rounded: dict[str, Operand] = {"x": (BFLOAT16, ("3 * tokens", 45))}
    for epilogue, bias in (
        ("none", {"bias": (FLOAT, (40,))}),
        ("swiglu", {}),
        ("swiglu_clamped", {"bias": (FLOAT, (40,))}),
    ):
        given = {"epilogue": epilogue, "to": int(FLOAT)}
        plain: dict[str, Operand] = {"x": (FLOAT, ("3 * tokens", 45)), "weight": (FLOAT, (40, 45))}
        for op, operands, attributes in (
            ("GroupedLinear", plain, given),
            ("GemmBf16", {**rounded, "weight": (BFLOAT16, (40, 45))}, {**given, "to": int(BFLOAT16)}),
            ("GemmW8A16", {**rounded, **eights}, given),
            ("GemmW8A8", {**codes, **eights}, {**given, "group": 32}),
            ("GemmW4A8", {**codes, **fours}, {**given, "group": 32}),
        ):
            cases.append(Case(op, {**operands, **bias, **starts}, attributes))  # type: ignore[dict-item]
    return cases


CASES: list[Case] = [
    *_routes(),
    *_products_of_experts(),
    *(
        Case(
            "SortRows",
            {"x": (FLOAT, (*rows, 45)), "places": (INT32, (*rows, 3)), **largest},
            {"to": int(to), "group": group},
        )
        for rows in (("tokens",), (1, "T"))
        for to, group, largest in (
            (FLOAT, 0, {}),
            (BFLOAT16, 0, {}),
            *((code, 0, {}) for code in GEMM_CODES),
            (INT8, 32, {}),
            (INT8, 32, {"largest": (FLOAT, (2,))}),
        )
        if rows != (1, "T") or to == FLOAT
    ),
    *(
        Case(
            "CombineExperts",
            {
                "y": (FLOAT, (f"3 * {rows[-1]}", 11)),
                "places": (INT32, (*rows, 3)),
                "share": (FLOAT, (*rows, 3)),
                **{name: (FLOAT, (*rows, columns)) for name, columns in more.items()},
            },
        )
        for rows in (("tokens",), (1, "T"))
        for more in ({}, {"shared": 11}, {"shared": 11, "gate": 1})
    ),
    *(
        Case(op, dict.fromkeys(operands, (FLOAT, (*rows, 11))) | {"weight": (FLOAT, (11,))}, _norm(to))
        for op, operands in (("RmsNorm", ["x"]), ("AddRmsNorm", ["x", "delta"]))
        for rows in (("tokens",), (1, "T"), ("tokens", 3))
        for to in (FLOAT, BFLOAT16, *GEMM_CODES)
    ),
    *(
        Case("QuantizeRows", {"x": (dtype, rows)}, {"to": int(to), "group": group})
        for to in GEMM_CODES
        for dtype in (FLOAT, BFLOAT16)
        for rows in (("tokens", 11), (1, "T", 11), ("tokens", 77))
        for group in (0, 32)
    ),
    *(
        Case("EmbedBf16", {"tokens": (dtype, rows), "table": (BFLOAT16, (31, 9))}, {"scale": 2.5})
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *(
        Case(
            "EmbedW8",
            {"tokens": (dtype, rows), "table": (INT8, (31, 9)), "table_scale": (FLOAT, (31,))},
            {"scale": 2.5},
        )
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *_gemms(),
    *_gemms_in_runs(),
    *(
        Case("RopeTable", {"positions": (dtype, rows), "inv_freq": (FLOAT, (7,))}, {"scale": 1.5})
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *(Case("Rope", {"x": (FLOAT, ("tokens", 30)), **_tables(rotary)}, {"heads": 3}) for rotary in (10, 6)),
    *(
        Case(
            "KvWrite",
            {"q": (FLOAT, ("tokens", 60)), **NEW, **_pools(stored), **SLOTS},
            {**HEADS, "stored": int(stored)},
        )
        for stored in STORED
    ),
    *(
        Case(
            "RopeKvWrite",
            {"q": (FLOAT, ("tokens", 60)), **NEW, **_tables(rotary), **_pools(stored), **SLOTS},
            {**HEADS, "stored": int(stored)},
        )
        for rotary, stored in ((10, BFLOAT16), *((6, stored) for stored in STORED))
    ),
    *(
        Case(
            "PagedAttention",
            {**PAGED, **_pools(stored), **sinks},
            {
                **SEEN,
                "window": window,
                "lookahead": lookahead,
                "softcap": softcap,
                "stored": int(stored),
                "queries": int(INT8 if stored == INT8 else BFLOAT16),
                "to": int(to),
            },
        )
        for window, lookahead, softcap, to, sinks in (
            (0, 0, 0.0, FLOAT, {}),
            (3, 0, 0.0, BFLOAT16, {}),
            (0, 0, 2.0, FLOAT, SINKS),
            (1, 0, 2.0, BFLOAT16, {}),
            (0, EVERYTHING, 0.0, FLOAT, {}),
            (3, 1, 0.0, BFLOAT16, {}),
        )
        for stored in STORED
    ),
    *(
        Case(
            "WindowAttention",
            {**PAST, **sinks},
            {
                "q_num_heads": 6,
                "kv_num_heads": 3,
                "scale": 0.3,
                "softcap": softcap,
                "window": window,
                "lookahead": lookahead,
            },
        )
        for window, lookahead, softcap, sinks in (
            (3, 0, 0.0, {}),
            (1, 0, 2.0, SINKS),
            (0, 0, 0.0, SINKS),
            (3, 2, 0.0, {}),
        )
    ),
    Case("MeanRows", {"x": (FLOAT, ("tokens", 11)), "query_start": (INT32, ("sequences + 1",))}),
    *(Case("Pool", {"x": (FLOAT, (1, "T", 11))}, {"pooling": pooling}) for pooling in POOLINGS),
    *(
        Case("HeadLinear", {"x": (FLOAT, (*rows, 33)), "weight": (FLOAT, (15, 11))}, {"heads": 3})
        for rows in (("tokens",), (1, "T"))
    ),
    *(
        Case("HeadGemm", {"x": (BFLOAT16, (*rows, 33)), "weight": (BFLOAT16, (15, 11))}, {"heads": 3, "to": int(to)})
        for rows in (("tokens",), (1, "T"))
        for to in (FLOAT, BFLOAT16)
    ),
    Case(
        "LatentAttention",
        {**_of_one_text({**LATENT, **_tables(4)}), "past_latent": (FLOAT, (1, 1, "P", 14))},
        {"heads": 3, "scale": 0.3},
    ),
    Case("LatentWrite", {**LATENT, **_tables(4), **LATENT_POOL, **SLOTS}, {"heads": 3}),
    *(
        Case(
            "LatentPagedAttention",
            {**PAGED, "q": (BFLOAT16, ("tokens", 42)), **LATENT_POOL},
            {"heads": 3, "head_dim": 14, "value_dim": 10, "scale": 0.3, "block_size": 4, "to": int(to)},
        )
        for to in (FLOAT, BFLOAT16)
    ),
    *(
        Case("GatherColumns", {"x": (FLOAT, (*rows, 11)), "columns": (INT32, (wanted,))}, {"to": int(to), "group": 0})
        for rows in (("tokens",), (1, "T"))
        for to in (FLOAT, BFLOAT16, *GEMM_CODES)
        for wanted in ((11, 5) if to in CODES else (11, 5, 17))  # the last with columns that x lacks
    ),
    *_convolutions(),
    *_delta_rules(),
    *_selective_states(),
    *(
        Case(
            "GatedRmsNorm",
            {**dict.fromkeys(("x", "z"), (FLOAT, (*rows, 33))), "weight": (FLOAT, (width,))},
            {**_norm(to), "run": run, "gate": gate},
        )
        for rows in (("tokens",), (1, "T"))
        for width, run, gate in ((11, 11, "after"), (33, 33, "before"), (33, 11, "before"))
        for to in (FLOAT, BFLOAT16, *GEMM_CODES)
    ),
    *(
        Case("Activation", {"x": (FLOAT, (*rows, 12)), **gate}, {"activation": activation, "to": int(to), "group": 0})
        for rows, to, activation, gate in (
            (("tokens",), FLOAT, "sigmoid", {"gate": (FLOAT, ("tokens", 12))}),
            (("tokens",), INT8, "sigmoid", {"gate": (FLOAT, ("tokens", 3))}),
            ((1, "T"), BFLOAT16, "silu", {"gate": (FLOAT, (1, "T", 1))}),
            ((1, "T"), FLOAT, "gelu", {}),
            (("tokens",), FP8, "gelu_tanh", {}),
            (("tokens",), FLOAT, "relu2", {}),
        )
    ),
    *(
        Case("LayerNorm", {"x": (FLOAT, (*rows, 11)), "weight": (FLOAT, (11,)), **bias}, _norm(to))
        for rows, to, bias in (
            (("tokens",), FLOAT, {}),
            ((1, "T"), FLOAT, {"bias": (FLOAT, (11,))}),
            (("tokens",), BFLOAT16, {"bias": (FLOAT, (11,))}),
            (("tokens",), INT8, {}),
        )
    ),
    *(
        Case("EmbedPositions", {"positions": (dtype, rows), "table": (FLOAT, (31, 9))})
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *(
        Case("PositionScale", {"x": (FLOAT, (*rows, 11)), "positions": (dtype, rows)}, {"beta": 0.3, "original": 5})
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *(Case("Scale", {"x": (FLOAT, (*rows, 11)), "factor": (FLOAT, (1,))}) for rows in (("tokens",), (1, "T"))),
    *(
        Case(
            "RopeQueries",
            {"q": (FLOAT, ("tokens", 60)), **tables, **_pools(stored)},
            {**HEADS, "stored": int(stored)},
        )
        for tables, stored in (({}, BFLOAT16), *((_tables(6), stored) for stored in STORED))
    ),
    Case(  # nothing is rotated
        "RopeKvWrite",
        {"q": (FLOAT, ("tokens", 60)), **NEW, **_pools(BFLOAT16), **SLOTS},
        {**HEADS, "stored": int(BFLOAT16)},
    ),
    *(Case("Softcap", {"x": (FLOAT, rows)}, {"cap": 3.0}) for rows in (("tokens", 11), (1, "T", 11))),
    # Scales of INT8 that are given.
    *(
        Case(
            "QuantizeRows",
            {"x": (FLOAT, ("tokens", 77)), "largest": (FLOAT, (runs,))},
            {"to": int(INT8), "group": group},
        )
        for group, runs in ((0, 1), (32, 3))
    ),
    *(
        Case(op, {**dict.fromkeys(operands, ROWS), **vector, "largest": (FLOAT, (1,))}, attributes)
        for op, operands, vector, attributes in (
            ("RmsNorm", ["x"], {"weight": (FLOAT, (11,))}, _norm(INT8)),
            ("AddRmsNorm", ["x", "delta"], {"weight": (FLOAT, (11,))}, _norm(INT8)),
            ("GatherColumns", ["x"], {"columns": (INT32, (11,))}, {"to": int(INT8), "group": 0}),
        )
    ),
]
FIRST = {case.op: case for case in reversed(CASES)}


def name_of(case: object) -> str:
    if not isinstance(case, Case):
        return ""
    return f"{case.op}-{'-'.join(str(value) for value in case.attributes.values())}"


def feed(name: str, operand: Operand, sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]) -> Array:
    dtype, dims = operand
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in dims]
    random = np.random.default_rng(len(name))
    if name == "slots" and dims == ("sequences",):
        name = "state_slots"
    if name in indices:
        given = np.array(indices[name][: int(np.prod(shape))], dtype.numpy())
        return (given.argsort().argsort().astype(dtype.numpy()) if name == "places" else given).reshape(shape)
    if dtype in (INT8, INT32, INT64):
        return random.integers(0, 31, shape).astype(dtype.numpy())
    if dtype == UINT8:  # codes of 4 bits
        return random.integers(0, 16, shape).astype(dtype.numpy())
    numbers = random.standard_normal(shape)
    return (np.abs(numbers) + 0.5 if name == "largest" else numbers).astype(dtype.numpy())


def model_of(node: ir.Node) -> ir.Model:
    inputs = [value for value in dict.fromkeys(node.inputs) if value is not None]
    graph = ir.Graph(inputs, [*node.outputs], nodes=[node], opset_imports={"": 24, DOMAIN: 1})
    return ir.Model(graph, ir_version=10)
