"""The switch to packed tokens over KV pools, and the passes after it."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (its dtypes have names in numpy)
import numpy as np
import onnx_ir as ir
import pytest

from enginewright.dtypes import DTYPES
from enginewright.errors import EngineError
from enginewright.passes.graph import standard, typed
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.pipeline import run_pipeline
from enginewright.passes.quant import Bf16, QuantConfig
from enginewright.plugins.attention.kv_write import STORED, pool_dtype
from enginewright.plugins.target import CPU_TARGET
from tests import tolerances
from tests.helpers.breadth import every_third
from tests.helpers.graphs import (
    CASES,
    QUANTS,
    STATE_CASES,
    DenseRun,
    dense_graph,
    graph_before,
    random_tokens,
    relative_error,
)
from tests.helpers.onnx_run import Array
from tests.helpers.ragged import GARBAGE, RaggedRun

LENGTHS = {"long": 75, "short": 3, "middle": 41}
# New tokens of each sequence, in the order in which they are packed: a prefill in chunks (one ends inside a block, one
# at a block's end), decodes with it, sequences that come later and that leave.
STEPS: list[dict[str, int]] = [
    {"long": 31},
    {"short": 2, "long": 1},
    {"long": 32, "middle": 40, "short": 1},
    {"middle": 1, "long": 11},
]
BLOCKS = 9  # of each pool: one that is nobody's, and some that stay free
KINDS = ["bf16", *(name for name in STORED if name != "bf16")]  # of pools


def in_turn(cases: Sequence[str], kinds: Sequence[Any]) -> list[tuple[str, Any]]:
    """Every case with the first kind and with one of the others: what the two do has little to do with each other."""
    first, *others = kinds
    return [(case, kind) for n, case in enumerate(cases) for kind in (first, others[n % len(others)])]


def name_of(value: str | QuantConfig) -> str:
    return value if isinstance(value, str) else value.name


def texts() -> dict[str, Array]:
    return {name: random_tokens(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}


def ragged_logits(model: ir.Model) -> tuple[dict[str, Array], dict[str, Array]]:
    """Logits of every token of every sequence, and the pools at the end."""
    ragged, tokens = RaggedRun(model, BLOCKS), texts()
    done = dict.fromkeys(tokens, 0)
    logits: dict[str, list[Array]] = {name: [] for name in tokens}
    for step in STEPS:
        new = {name: tokens[name][done[name] : done[name] + count] for name, count in step.items()}
        for name, rows in ragged.step(new).items():
            logits[name].append(rows)
            done[name] += step[name]
    assert done == LENGTHS
    return {name: np.concatenate(parts) for name, parts in logits.items()}, ragged.pools


def dense_logits(model: ir.Model) -> dict[str, Array]:
    """Logits of the dense graph, each sequence by itself: a prefill, a chunk and a decode."""
    logits, dense = {}, DenseRun(model)
    for name, tokens in texts().items():
        dense.begin()
        parts = np.split(tokens, [max(1, len(tokens) - 20), len(tokens) - 1])
        logits[name] = np.concatenate([dense.step(part) for part in parts if len(part)])
    return logits


def round_what_attention_reads(model: ir.Model) -> None:
    """Queries, keys and values go through bfloat16, as they do on their way into the KV pools."""
    graph = model.graph
    for node in [each for each in graph if each.op_type in ("Attention", "WindowAttention")]:
        for index in range(3):
            value = node.inputs[index]
            assert value is not None and value.shape is not None
            name = f"{node.name}.{index}"
            low = typed(f"{name}.low", ir.DataType.BFLOAT16, value.shape.dims)
            back = typed(f"{name}.back", ir.DataType.FLOAT, value.shape.dims)
            casts = [
                standard("Cast", [value], [low], f"{name}.low", to=ir.DataType.BFLOAT16.value),
                standard("Cast", [low], [back], f"{name}.back", to=ir.DataType.FLOAT.value),
            ]
            graph.insert_before(node, casts)
            node.replace_input_with(index, back)


PACKED = in_turn([*CASES, *STATE_CASES], QUANTS)
SOME_PACKED = [each for n, each in enumerate(PACKED) if n % 4 in (0, 3)]  # the first kind, or another one
PASSES = [
    (name, case, kind)
    for name in ("fuse_rope_kv_write", "round_in_producer", "gather_early")
    for case, kind in in_turn([*CASES, "qwen3_5_text"], KINDS)
]
SOME_PASSES = PASSES[::7]
FINISHED = in_turn([*CASES], QUANTS)
SOME_FINISHED = [each for n, each in enumerate(FINISHED) if n % 4 in (0, 3)]
CODES = [(case, dtype) for case in CASES for dtype in tolerances.KV_LOGITS]
SOME_CODES = every_third(CASES, [*tolerances.KV_LOGITS])


@pytest.mark.parametrize(("case", "quant"), SOME_PACKED, ids=name_of)
def test_packed_sequences_are_as_each_by_itself(case: str, quant: QuantConfig) -> None:
    dense, to_ragged = graph_before(case, "to_ragged", quant)
    ragged = dense.clone()
    (result,) = run_passes(ragged, [to_ragged]).values()
    assert result.rewrites == 3
    round_what_attention_reads(dense)
    expected, (actual, _) = dense_logits(dense), ragged_logits(ragged)
    int8 = quant.precision(CPU_TARGET).dtype == ir.DataType.INT8
    bound = tolerances.RAGGED_INT8_LOGITS if int8 else tolerances.RAGGED_LOGITS
    for name, rows in expected.items():
        assert relative_error(actual[name], rows) < bound, name


@pytest.mark.parametrize(("name", "case", "kv_dtype"), SOME_PASSES)
def test_results_are_the_same_before_and_after(name: str, case: str, kv_dtype: str) -> None:
    model, own = graph_before(case, name, kv_dtype=kv_dtype)
    logits, pools = ragged_logits(model)
    (result,) = run_passes(model, [own]).values()
    assert result.rewrites > 0
    fused_logits, fused_pools = ragged_logits(model)
    for one, other in ((logits, fused_logits), (pools, fused_pools)):
        assert one.keys() == other.keys()
        for key, expected in one.items():
            np.testing.assert_array_equal(other[key], expected, key)


@pytest.mark.parametrize(("case", "quant"), SOME_FINISHED, ids=name_of)
def test_the_finished_graph_is_near_the_imported_one(case: str, quant: QuantConfig) -> None:
    imported = dense_graph(case)
    expected = dense_logits(imported)
    finished, _ = run_pipeline(imported, quant)
    actual, pools = ragged_logits(finished)
    for name, rows in expected.items():
        # bf16 rounding is there at all, and nothing but it.
        assert 1e-8 < relative_error(actual[name], rows) < tolerances.ENGINE_LOGITS[quant.name], name
    for name, pool in pools.items():
        blocks = pool.astype(np.float32).reshape(BLOCKS, -1)
        untouched = (np.abs(blocks) == np.abs(blocks[0, 0])).all(axis=1)
        # Three, one and two blocks hold sequences; the block that is nobody's and the free ones keep their garbage.
        assert (untouched[0], untouched.sum()) == (True, BLOCKS - 6), name


@pytest.mark.parametrize(("case", "kv_dtype"), SOME_CODES)
def test_pools_of_codes_are_near_those_of_bf16(case: str, kv_dtype: str) -> None:
    """Attention reads a row of codes in place of the row; nothing else differs."""
    exact, rounded = (run_pipeline(dense_graph(case), Bf16(), kv_dtype=dtype)[0] for dtype in ("bf16", kv_dtype))
    (expected, _), (actual, pools) = ragged_logits(exact), ragged_logits(rounded)
    for name, rows in expected.items():
        assert 1e-8 < relative_error(actual[name], rows) < tolerances.KV_LOGITS[kv_dtype], name
    rows = pools["key_pool.0"].astype(np.float64)
    heads = rows[np.abs(rows).max(axis=(1, 2)) < GARBAGE / 2]  # that were written
    assert len(heads) == sum(LENGTHS.values())
    if kv_dtype == "u4":  # of 16 equal steps, some of them twice
        assert max(len(np.unique(row)) for row in heads.reshape(-1, heads.shape[-1])) <= 16
        return
    kind = np.dtype(DTYPES[kv_dtype].torch)
    codes = heads / np.abs(heads).max(axis=-1, keepdims=True) * DTYPES[kv_dtype].largest
    nearest = np.round(codes) if kind == np.int8 else codes.astype(kind).astype(np.float64)
    np.testing.assert_allclose(codes, nearest, atol=1e-4)


@pytest.mark.parametrize(
    ("attribute", "change"), [("window", lambda w: w + 1 if w else 0), ("scale", lambda x: x * 1.01)]
)
def test_the_comparison_sees_faults(attribute: str, change: Callable[[float], float]) -> None:
    model, _ = run_pipeline(dense_graph("gemma3_text"), Bf16())
    expected, _ = ragged_logits(model)
    for node in model.graph:
        if node.op_type == "PagedAttention":
            wrong = change(node.attributes[attribute].value)
            node.attributes.add(ir.convenience.convert_attribute(attribute, wrong))
    actual, _ = ragged_logits(model)
    assert relative_error(actual["long"], expected["long"]) > 10 * tolerances.RAGGED_LOGITS
    if attribute == "window":
        np.testing.assert_array_equal(actual["short"], expected["short"])  # it ends inside the window


FINAL_OPS = {
    "Activation", "Add", "AddRmsNorm", "Cast", "CombineExperts", "EmbedBf16", "EmbedW8", "Gather", "GemmBf16",
    "GemmFp8A16", "GemmMxfp4A8", "GemmW4A8", "GemmW8A16", "GemmW8A8", "LayerNorm", "PagedAttention", "QuantizeRows",
    "RMSNormalization", "Reshape", "RmsNorm", "Rope", "RopeKvWrite", "RopeTable", "Route", "Softcap", "SortRows",
    "Split",
}  # fmt: skip


FORMATS = [*((quant, "bf16") for quant in QUANTS), *((Bf16(), name) for name in STORED if name != "bf16")]
LOWERED = [(case, quant, kind) for case in CASES for quant, kind in FORMATS]
SOME_LOWERED = [(case, *format) for case, format in every_third(CASES, FORMATS)][::2]  # each case, and each format


@pytest.mark.parametrize(("case", "quant", "kv_dtype"), SOME_LOWERED, ids=name_of)
def test_the_finished_graph_is_what_a_lowering_takes(case: str, quant: QuantConfig, kv_dtype: str) -> None:
    dense = dense_graph(case)
    groups = json.loads(dense.metadata_props["enginewright.kv_groups"])
    model, _ = run_pipeline(dense, quant, kv_dtype=kv_dtype)
    assert {node.op_type for node in model.graph} <= FINAL_OPS
    shapes = {str(value.name): (value.dtype, str(value.shape)) for value in model.graph.inputs}
    tables = {f"slots.{group}": "[tokens]" for group in range(len(groups))}
    tables |= {f"block_table.{group}": "[sequences,kv_blocks]" for group in range(len(groups))}
    expected = {
        "tokens": "[tokens]",
        "positions": "[tokens]",
        "query_start": "[sequences + 1]",
        "kv_len": "[sequences]",
        "logit_rows": "[logit_rows]",
        **tables,
    }
    pools = {
        f"{kind}_pool.{layer}": (
            pool_dtype(STORED[kv_dtype]),
            f"[slots.{group},{entry['kv_heads']},{entry['head_dim']}]",
        )
        for group, entry in enumerate(groups)
        for layer in entry["layers"]
        for kind in ("key", "value")
    }
    assert shapes == {name: (ir.DataType.INT32, shape) for name, shape in expected.items()} | pools
    logits, *written = model.graph.outputs
    assert (logits.name, logits.dtype, str(logits.shape)) == ("logits", ir.DataType.FLOAT, "[logit_rows,307]")
    assert {str(value.name): (value.dtype, str(value.shape)) for value in written} == {
        f"{name}.out": pool for name, pool in pools.items()
    }
    assert json.loads(model.metadata_props["enginewright.kv_groups"]) == groups


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_only_wanted_rows_pass_what_is_after_the_last_attention(case: str) -> None:
    model, _ = run_pipeline(dense_graph(case), Bf16())
    *_, attention = (node for node in model.graph if node.op_type == "PagedAttention")
    first, second = (node for node in model.graph if node.op_type == "Gather")
    assert {first.inputs[0], second.inputs[0]} > {attention.outputs[0]}
    nodes = tuple(model.graph)
    later = [node for node in nodes[nodes.index(attention) + 1 :] if node.op_type not in ("Gather", "Cast")]
    assert sum(node.op_type == "GemmBf16" for node in later) == 4  # o, gate and up, down, head
    assert {str(value.shape[0]) for node in later for value in node.outputs if value.shape} == {"logit_rows"}
    assert not [node for node in nodes if node.op_type == "Cast"]


@pytest.mark.parametrize("reader", ["logits", "layers.2.mlp.down_proj", "layers.2.self_attn.o_proj"])
def test_rows_are_chosen_after_what_somebody_else_reads_whole(reader: str) -> None:
    model, own = graph_before("llama", "gather_early")
    value = next(value for node in model.graph for value in node.outputs if value.name == reader)
    if reader == "logits":
        value = next(node for node in model.graph if node.op_type == "Gather" and node.outputs[0] is value).inputs[0]
    model.graph.outputs.append(value)
    whole = str(value.shape)
    (result,) = run_passes(model, [own]).values()
    assert result.rewrites == {"logits": 0, "layers.2.mlp.down_proj": 2, "layers.2.self_attn.o_proj": 5}[reader]
    assert str(value.shape) == whole


def _mask(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "Attention")
    mask = typed("mask", ir.DataType.FLOAT, (1, 1))
    mask.const_value = ir.tensor(np.zeros((1, 1), np.float32), name="mask")
    model.graph.register_initializer(mask)
    node.replace_input_with(3, mask)


def _interleave(model: ir.Model) -> None:
    next(node for node in model.graph if node.op_type == "RotaryEmbedding").attributes.add(
        ir.AttrInt64("interleaved", 1)
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_mask, r"layers\.0\.attention has a mask: PagedAttention has a window"),
        (_interleave, r"q_proj\.rotated rotates adjacent columns"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_packed_is_named(spoil: object, message: str) -> None:
    model, to_ragged = graph_before("llama", "to_ragged")
    assert callable(spoil)
    spoil(model)
    with pytest.raises(EngineError, match=message):
        to_ragged(model)


@pytest.mark.parametrize(
    ("skipped", "ropes"), [(slice(2, 4), 0), (slice(2, 3), 1)], ids=["neither is rotated", "only keys are"]
)
def test_layers_without_rotation(skipped: slice, ropes: int) -> None:
    """If queries and keys are not both rotated, the rotation of one has a kernel of its own."""
    model = dense_graph("llama")
    for node in [node for node in model.graph if node.op_type == "RotaryEmbedding"][skipped]:
        assert node.inputs[0] is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    expected = dense_logits(model)
    finished, results = run_pipeline(model, Bf16())
    assert results["fuse_rope_kv_write"].rewrites == 3
    assert [node.op_type for node in finished.graph].count("Rope") == ropes
    actual, _ = ragged_logits(finished)
    for name in LENGTHS:
        assert relative_error(actual[name], expected[name]) < tolerances.ENGINE_LOGITS["bf16"]
