"""Every op of ours: what it says of its outputs is what onnxruntime gives, and what does not fit is refused."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from enginewright.errors import EngineError
from enginewright.plugins import DOMAIN, PLUGINS, Plugin, expand_references, plugin_of
from enginewright.plugins.kv_write import pool_dtype
from tests.onnx_run import Array, run

FLOAT, BFLOAT16, FP8 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN
INT8, INT32, INT64, UINT8 = ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8
Operand = tuple[ir.DataType, tuple[int | str, ...]]
# What symbolic dimensions are when a graph is run. A block has 4 slots.
SIZES = {"T": 5, "P": 3, "tokens": 7, "slots": 24, "sequences": 2, "sequences + 1": 3, "kv_blocks": 2}
SIZES |= {"P + T": 8}
ONE = {**SIZES, "T": 1, "P": 0, "tokens": 1, "sequences": 1, "sequences + 1": 2, "P + T": 1}
INDICES: Mapping[str, Sequence[int]] = {  # values that must be in range, or fit each other
    "slots": [23, 4, 9, 0, 17, 5, 12],
    "query_start": [0, 3, 7],
    "kv_len": [5, 8],
    "block_table": [4, 1, 5, 2],
    "columns": [10, 0, 3, 3, 7, 1, 9, 2, 8, 5, 4],
}
INDICES_OF_ONE: Mapping[str, Sequence[int]] = {**INDICES, "query_start": [0, 1], "kv_len": [1]}


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


def _integer_gemms() -> list[Case]:
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
STORED = (BFLOAT16, INT8, FP8)


def _pools(stored: ir.DataType) -> dict[str, Operand]:
    return dict.fromkeys(("key_pool", "value_pool"), (pool_dtype(stored), ("slots", 3, 10)))


NEW: dict[str, Operand] = {"k": (FLOAT, ("tokens", 30)), "v": (FLOAT, ("tokens", 30))}
SLOTS: dict[str, Operand] = {"slots": (INT32, ("tokens",))}
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


def _tables(rotary: int) -> dict[str, Operand]:
    return {"cos": (FLOAT, ("tokens", rotary // 2)), "sin": (FLOAT, ("tokens", rotary // 2))}


CASES: list[Case] = [
    *(
        Case(op, dict.fromkeys(operands, (FLOAT, (*rows, 11))) | {"weight": (FLOAT, (11,))}, _norm(to))
        for op, operands in (("RmsNorm", ["x"]), ("AddRmsNorm", ["x", "delta"]))
        for rows in (("tokens",), (1, "T"), ("tokens", 3))
        for to in (FLOAT, BFLOAT16, INT8)
    ),
    *(
        Case("QuantizeRows", {"x": (dtype, rows)}, {"group": group})
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
    *_integer_gemms(),
    *(
        Case("RopeTable", {"positions": (dtype, rows), "inv_freq": (FLOAT, (7,))}, {"scale": 1.5})
        for dtype, rows in ((INT32, ("tokens",)), (INT64, (1, "T")))
    ),
    *(Case("Rope", {"x": (FLOAT, ("tokens", 30)), **_tables(rotary)}, {"heads": 3}) for rotary in (10, 6)),
    *(
        Case("KvWrite", {**NEW, **_pools(stored), **SLOTS}, {"kv_heads": 3, "head_dim": 10, "stored": int(stored)})
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
            {**PAGED, **_pools(stored)},
            {
                **SEEN,
                "window": window,
                "softcap": softcap,
                "stored": int(stored),
                "queries": int(INT8 if stored == INT8 else BFLOAT16),
                "to": int(to),
            },
        )
        for window, softcap, to in ((0, 0.0, FLOAT), (3, 0.0, BFLOAT16), (0, 2.0, FLOAT), (1, 2.0, BFLOAT16))
        for stored in STORED
    ),
    *(
        Case(
            "CausalWindow",
            PAST,
            {"q_num_heads": 6, "kv_num_heads": 3, "scale": 0.3, "softcap": softcap, "window": window},
        )
        for window, softcap in ((3, 0.0), (1, 2.0))
    ),
    *(
        Case("GatherColumns", {"x": (FLOAT, (*rows, 11)), "columns": (INT32, (11,))}, {"to": int(to), "group": 0})
        for rows in (("tokens",), (1, "T"))
        for to in (FLOAT, BFLOAT16, INT8)
    ),
    *(Case("Softcap", {"x": (FLOAT, rows)}, {"cap": 3.0}) for rows in (("tokens", 11), (1, "T", 11))),
]
FIRST = {case.op: case for case in reversed(CASES)}


def _name(case: object) -> str:
    if not isinstance(case, Case):
        return ""
    return f"{case.op}-{'-'.join(str(value) for value in case.attributes.values())}"


def feed(name: str, operand: Operand, sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]) -> Array:
    dtype, dims = operand
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in dims]
    random = np.random.default_rng(len(name))
    if name in indices:
        return np.array(indices[name][: int(np.prod(shape))], dtype.numpy()).reshape(shape)
    if dtype in (INT8, INT32, INT64):
        return random.integers(0, 31, shape).astype(dtype.numpy())
    if dtype == UINT8:  # codes of 4 bits
        return random.integers(0, 16, shape).astype(dtype.numpy())
    return random.standard_normal(shape).astype(dtype.numpy())


def model_of(node: ir.Node) -> ir.Model:
    inputs = [value for value in dict.fromkeys(node.inputs) if value is not None]
    graph = ir.Graph(inputs, [*node.outputs], nodes=[node], opset_imports={"": 24, DOMAIN: 1})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(("sizes", "indices"), [(SIZES, INDICES), (ONE, INDICES_OF_ONE)], ids=["some", "one"])
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_what_an_op_says_is_what_onnxruntime_gives(
    case: Case, sizes: Mapping[str, int], indices: Mapping[str, Sequence[int]]
) -> None:
    node = case.node()
    inferred = case.plugin.infer(node)
    assert inferred == [(value.dtype, value.shape.dims) for value in node.outputs if value.shape is not None]
    feeds = {name: feed(name, operand, sizes, indices) for name, operand in case.operands.items()}
    actual = [*run(model_of(node), feeds).values()]
    assert len(actual) == len(inferred) == len(node.outputs)
    for array, (dtype, dims) in zip(actual, inferred, strict=True):
        assert array.dtype == dtype.numpy()
        assert array.shape == tuple(dim if isinstance(dim, int) else sizes[str(dim)] for dim in dims)
        assert np.isfinite(array.astype(np.float32)).all()
        assert len(np.unique(array)) > 1 or array.size == 1


def test_every_op_is_run() -> None:
    assert set(FIRST) == set(PLUGINS)
    assert all(name == plugin.name for name, plugin in PLUGINS.items())


def test_every_file_with_an_op_has_its_line_in_the_registry() -> None:
    folder = Path(__file__).resolve().parent.parent / "plugins"
    defined = {
        path.stem: names
        for path in folder.glob("*.py")
        if (names := re.findall(r'^[A-Z0-9_]+ = Plugin\(\s+name="(\w+)"', path.read_text(), re.MULTILINE))
    }
    assert sorted(name for names in defined.values() for name in names) == sorted(PLUGINS)
    for stem, names in defined.items():
        assert [name.lower() for name in names] == [stem.replace("_", "")]


def _wrong(plugin: Plugin, good: Case) -> list[tuple[str, ir.Node]]:
    """Nodes that do not fit the schema, each with the reason to give."""
    attributes, count, written = good.attributes, len(plugin.inputs), len(good.node().outputs)

    def node(
        changed: Mapping[str, int | float | str], outputs: int = 0, without: int | None = None, surplus: bool = False
    ) -> ir.Node:
        inputs = good.inputs()
        inputs += [None] * (count - len(inputs))
        if without is not None:
            inputs[without] = None
        if surplus:
            inputs.append(inputs[0])
        converted = [ir.convenience.convert_attribute(*item) for item in changed.items()]
        return ir.Node(DOMAIN, plugin.name, inputs, converted, num_outputs=written + outputs, name="it")

    wrong = [
        (f"it has {count + 1} inputs, not {count}", node(attributes, surplus=True)),
        (f"it has {written + 1} outputs, not {written}", node(attributes, outputs=1)),
        ("its attributes are .*surplus: int.*, not ", node({**attributes, "surplus": 1})),
    ]
    for index, name in enumerate(plugin.inputs):
        if not name.endswith("?"):
            wrong.append((f"it lacks {name}$", node(attributes, without=index)))
    for name, kind in plugin.attributes.items():
        others = {key: value for key, value in attributes.items() if key != name}
        other: int | float = 1 if kind is not int else 1.0
        wrong.append((rf"its attributes are .*, not .*\b{name}: {kind.__name__}", node(others)))
        wrong.append((f"its attributes are .*{name}: {type(other).__name__}", node({**others, name: other})))
    return wrong


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=lambda plugin: plugin.name)
def test_a_node_that_does_not_fit_its_schema_is_named(plugin: Plugin) -> None:
    good = FIRST[plugin.name]
    plugin.check(good.node())
    for reason, node in _wrong(plugin, good):
        with pytest.raises(EngineError, match=f"(?s)node it is no {plugin.name}: {reason}"):
            plugin.check(node)
        with pytest.raises(EngineError, match="node it is no"):
            expand_references(model_of(node))


def test_an_optional_input_may_be_absent_in_both_ways() -> None:
    without = FIRST["GemmBf16"]
    assert "bias" not in without.operands
    for inputs in (without.inputs(), [*without.inputs(), None]):
        without.plugin.node(inputs, **without.attributes)


def test_a_scale_stands_beside_int8_alone() -> None:
    case = FIRST["RmsNorm"]
    for to, others in ((FLOAT, []), (BFLOAT16, []), (INT8, [FLOAT])):
        node = case.plugin.node(case.inputs(), **{**case.attributes, "to": int(to)})
        assert [value.dtype for value in node.outputs] == [to, *others]
        node.attributes.add(ir.AttrInt64("to", int(FLOAT if to == INT8 else INT8)))
        with pytest.raises(EngineError, match=f"it has {len(others) + 1} outputs, not {2 - len(others)}"):
            case.plugin.check(node)


def test_an_op_that_we_do_not_have_is_named() -> None:
    with pytest.raises(EngineError, match=r"node it is of an unknown op enginewright\.Gemm: known: AddRmsNorm, "):
        plugin_of(ir.Node(DOMAIN, "Gemm", [], name="it"))
    assert plugin_of(ir.Node("", "Gemm", [], name="it")) is None


def test_expanding_gives_a_copy_in_standard_ops_and_leaves_the_graph() -> None:
    model = model_of(FIRST["Softcap"].node())
    expanded = expand_references(model)
    assert [node.op_type for node in model.graph] == ["Softcap"]
    assert {node.domain for node in expanded.graph} == {""}
    assert set(expanded.graph.opset_imports) == {""}
    assert [value.name for value in expanded.graph.outputs] == ["out.0"]
