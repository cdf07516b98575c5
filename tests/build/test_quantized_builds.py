"""Checkpoints that are quantized already: built as they are, run, and compared with transformers on what they stand
for.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.builder.build import BuildConfig, BuildReport, build_engine
from enginewright.builder.gate import GateConfig
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.quant import act_order
from enginewright.passes.quant.act_order import SortColumns
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.graphs import DenseRun, random_tokens, relative_error
from tests.helpers.quantized import CASES, GPTQ, Tiny, fp8, gptq, mixed, pack_quantized, tiny_case, tiny_quantized


def build(tiny: Tiny, path: Path, gate: GateConfig | None = None) -> BuildReport:
    return build_engine(tiny.checkpoint, BuildConfig(gate=gate), path)


def error_of(tiny: Tiny, path: Path) -> float:
    """Relative error of the engine's logits against those of the weights that the checkpoint stands for."""
    texts = [random_tokens(length, seed=length).tolist() for length in (1, 2, 33, 61)]
    with torch.inference_mode():
        expected = [tiny.model(torch.tensor([text])).logits[0].numpy() for text in texts]
    with Engine.open(path) as engine:
        executor = CpuExecutor(engine, RuntimeConfig(max_num_batched_tokens=64, max_logit_rows=64))
        actual = score(executor, texts)
    return max(relative_error(rows, reference) for rows, reference in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_an_engine_computes_what_the_checkpoint_stands_for(name: str, tmp_path: Path) -> None:
    tiny, path = tiny_case(name), tmp_path / "tiny.engine"
    report = build(tiny, path)
    assert error_of(tiny, path) < tolerances.STORED_LOGITS[CASES[name][2]]
    reads = tiny.checkpoint.reads
    assert len(reads) == len(set(reads)), "each tensor is read once"
    assert report.rewrites["fuse_qkv"] == report.rewrites["fuse_swiglu"] == 3
    with Engine.open(path) as engine:
        assert engine.manifest.recipe["quant"] == CASES[name][1]["quant_method"]


def test_nothing_but_orders_of_columns_is_read_before_packing() -> None:
    tiny = tiny_case("gptq")
    build_graph(tiny.checkpoint)
    assert {name.rpartition(".")[2] for name in tiny.checkpoint.reads} == {"g_idx"}
    tiny = tiny_case("awq")
    build_graph(tiny.checkpoint)
    assert tiny.checkpoint.reads == []


def test_the_dense_graph_has_the_same_numbers() -> None:
    """The dense graph, which `engine export` writes, has the checkpoint's numbers."""
    tiny = tiny_case("gptq, zero points")
    tokens = random_tokens(40, seed=0)
    with torch.inference_mode():
        expected = tiny.model(torch.tensor(tokens)[None]).logits[0].numpy()
    actual = DenseRun(build_graph(tiny.checkpoint)).step(tokens)
    assert np.abs(actual - expected).max() < tolerances.DENSE_LOGITS


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_act_order_is_sorted_once_for_all_layers_of_an_input(mlp_bias: bool, tmp_path: Path) -> None:
    """Columns are sorted once for queries, keys and values, for the output, and for gate and up; for down, the rows of
    gate and up move instead.
    """
    path = tmp_path / "tiny.engine"
    tiny = tiny_quantized(gptq(order="shared"), {**GPTQ, "desc_act": True}, mlp_bias=mlp_bias)
    report = build(tiny, path, GateConfig())
    assert (report.rewrites["sort_columns"], report.notes) == (21, [])
    assert report.rewrites["fuse_qkv"] == report.rewrites["fuse_swiglu"] == 3
    assert error_of(tiny, path) < tolerances.STORED_LOGITS["int4"]
    with Engine.open(path) as engine:
        kernels = [step.kernel for step in engine.plan.calls]
    assert kernels.count("gather_columns@1") == 3 * 3
    assert kernels.count("gemm_w4a8@1") == 3 * 4


def test_act_order_in_which_siblings_differ_is_restored(tmp_path: Path) -> None:
    tiny = tiny_quantized(gptq(order="each"), {**GPTQ, "desc_act": True})
    report = build(tiny, tmp_path / "tiny.engine")
    assert report.rewrites["sort_columns"] == 2 * 3  # output and down, which are read alone
    assert report.notes == [f"15 weights: {act_order.RESTORED}"]
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]


def test_act_order_next_to_a_layer_in_order_is_restored(tmp_path: Path) -> None:
    packs = {"gate_proj": gptq(order="shared"), "up_proj": gptq()}
    tiny = tiny_quantized(packs, {**GPTQ, "desc_act": True})
    report = build(tiny, tmp_path / "tiny.engine")
    assert report.rewrites["sort_columns"] == 0
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]


def test_sorting_changes_no_number_of_the_graph() -> None:
    model = build_graph(tiny_quantized(gptq(order="shared"), {**GPTQ, "desc_act": True}).checkpoint)
    tokens = random_tokens(21, seed=1)
    before = DenseRun(model).step(tokens)
    results = run_passes(model, [SortColumns()])
    assert results["sort_columns"].rewrites == 21
    assert [node.op_type for node in model.graph].count("GatherColumns") == 9
    # Weights were restored and rounded to bf16 before, and are not now.
    assert relative_error(DenseRun(model).step(tokens), before) < tolerances.STORED_LOGITS["bf16"]


def test_rows_stay_where_somebody_else_sees_them() -> None:
    """Rows of a gate that is read elsewhere too stay in place; down's input is gathered instead."""
    model = build_graph(tiny_quantized(gptq(order="shared"), {**GPTQ, "desc_act": True}).checkpoint)
    gate = next(node for node in model.graph if node.name == "layers.1.mlp.gate_proj")
    seen = SOFTCAP.node([gate.outputs[0]], cap=1.0)
    seen.name = seen.outputs[0].name = "seen"
    model.graph.append(seen)
    model.graph.outputs.append(seen.outputs[0])
    assert run_passes(model, [SortColumns()])["sort_columns"].rewrites == 21
    assert [node.op_type for node in model.graph].count("GatherColumns") == 10


def test_a_weight_that_two_layers_read_is_not_sorted_for_one() -> None:
    model = build_graph(tiny_quantized(gptq(order="shared"), {**GPTQ, "desc_act": True}).checkpoint)
    q, again = (next(node for node in model.graph if node.name == f"layers.{i}.self_attn.q_proj") for i in (1, 2))
    again.replace_input_with(1, q.inputs[1])
    result = run_passes(model, [SortColumns()])["sort_columns"]
    assert (result.rewrites, result.notes) == (21 - 6, (act_order.RESTORED,) * 6)  # q, k and v of both


def test_act_order_over_gates_that_are_quantized_in_order(tmp_path: Path) -> None:
    """Rows of these gates move in all of their parts: codes, scales and zero points."""
    packs = {"down_proj": gptq(order="each", symmetric=False)}
    packs |= dict.fromkeys(("gate_proj", "up_proj"), gptq(symmetric=False))
    tiny = tiny_quantized(packs, {**GPTQ, "desc_act": True, "sym": False})
    report = build(tiny, tmp_path / "tiny.engine")
    assert (report.rewrites["sort_columns"], report.notes) == (3, [])
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]


def test_layers_of_one_input_in_different_formats(tmp_path: Path) -> None:
    """Queries, keys and values stay apart; of gate and up there is no kernel for one alone, so both are restored."""
    tiny = tiny_quantized(dict.fromkeys(("q_proj", "k_proj", "up_proj"), gptq()), GPTQ)
    report = build(tiny, tmp_path / "tiny.engine")
    assert report.rewrites["fuse_qkv"] == 0
    assert report.notes == [
        "3 weights: restored, because gate and up projection are quantized in different formats",
    ]
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]


def test_a_head_that_is_quantized(tmp_path: Path) -> None:
    packs = dict.fromkeys(("lm_head", "o_proj"), gptq(symmetric=False))
    tiny = tiny_quantized(packs, {**GPTQ, "sym": False, "lm_head": True}, vocab_size=312)
    build(tiny, tmp_path / "tiny.engine")
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]


def test_fp8_in_blocks_keeps_its_numbers(tmp_path: Path) -> None:
    """q, k and v, and gate and up, end inside blocks."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    sizes = {"hidden_size": 180, "intermediate_size": 300, "head_dim": 30}
    tiny = tiny_quantized(fp8((128, 128), scale="weight_scale_inv"), config, **sizes)
    report = build(tiny, tmp_path / "tiny.engine")
    assert report.notes == [] and report.rewrites["fuse_qkv"] == report.rewrites["fuse_swiglu"] == 3
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["bf16"]
    with Engine.open(tmp_path / "tiny.engine") as engine:
        forms = {
            name: engine.weight(f"model.layers.0.mlp.{name}")[1]
            for name in ("gate_up_proj.weight", "down_proj.weight.scale")
        }
    assert forms["gate_up_proj.weight"].dtype == "e4m3" and forms["down_proj.weight.scale"].shape == (180, 3)


def test_a_format_that_no_weight_has_is_noted() -> None:
    model = build_graph(tiny_quantized({}, GPTQ).checkpoint)
    (text, count), *others = json.loads(model.metadata_props["enginewright.notes"]).items()
    assert "not quantized, though" in text and count == 3 * 7 + 2 and not others


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_is_quantized_is_restored(tied: bool, tmp_path: Path) -> None:
    """No kernel looks FP8 up. The gate agrees, which compares with what the checkpoint stands for."""
    config = {"quant_method": "fp8", "modules_to_convert": ["model.embed_tokens"]}
    tiny = tiny_quantized({"embed_tokens": fp8(shape=(1,)), "o_proj": fp8()}, config, tie_word_embeddings=tied)
    report = build(tiny, tmp_path / "tiny.engine", GateConfig())
    assert report.notes == ["1 weight: an embedding, which no kernel looks up in its format, is restored to bfloat16"]
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["bf16"]


def test_biases_that_are_zeros_are_left_over() -> None:
    """AutoGPTQ gives every layer one."""
    tiny = tiny_case("gptq")
    bias = "model.layers.1.mlp.up_proj.bias"
    stored = {**tiny.checkpoint.stored, bias: torch.zeros(96, dtype=torch.float16)}
    tiny.checkpoint.stored = stored
    build_graph(tiny.checkpoint)
    stored[bias][7] = 1
    with pytest.raises(EngineError, match=r"1 of .*up_proj\.bias"):
        build_graph(tiny.checkpoint)


def test_zero_points_of_symmetric_weights_are_left_over() -> None:
    """Zero points of symmetric weights, which compressed-tensors has stored, are ignored where they are zero."""
    tiny = tiny_case("pack")
    zeros = torch.zeros(64, 2, dtype=torch.int8)
    tiny.checkpoint.stored = {**tiny.checkpoint.stored, "model.layers.1.self_attn.q_proj.weight_zero_point": zeros}
    build_graph(tiny.checkpoint)
    zeros[3, 1] = -1
    with pytest.raises(EngineError, match=r"1 of .*q_proj\.weight_zero_point"):
        build_graph(tiny.checkpoint)


@pytest.mark.parametrize(
    "targets",
    [
        {"3": ["re:.*self_attn.*"], "4": ["re:.*mlp.*"]},
        {"4": ["Linear"], "3": [r"re:model\.layers\.\d\.self_attn\.(q|k|v|o)_proj$"]},
        {"4": ["re:model.*"], "3": [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qkvo"]},
    ],
)
def test_groups_of_layers_are_told_apart(targets: Mapping[str, list[str]], tmp_path: Path) -> None:
    packs = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), pack_quantized(3))
    packs |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), pack_quantized(4))
    tiny = tiny_quantized(packs, mixed(targets))
    build(tiny, tmp_path / "tiny.engine")
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["int4"]
