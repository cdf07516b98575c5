"""The sites of adapters: every weight before quantization is what its site makes of the checkpoint's tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch

from enginewright.adapter_sites import ADAPTER_SITES, AdapterSites, Site
from enginewright.builder.assembly import Assembly, BuildConfig, assemble
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.progress import Silent
from enginewright.passes.graph import head_of
from enginewright.passes.quant import QuantConfig, quant_config
from enginewright.passes.quant.method import Calibration, stored
from enginewright.passes.weights import open_rows, shape_of
from tests.helpers import tiny_gguf
from tests.helpers.adapter_sites import mapped, mapped_bias, matrix_name, stored_matrix
from tests.helpers.graphs import random_tokens
from tests.helpers.quantized import GPTQ, gptq, tiny_quantized
from tests.helpers.tiny import MemoryCheckpoint, saved, tiny_config, tiny_model

Array = npt.NDArray[np.float32]
ROUNDING = 2**-8  # that of bfloat16, which restored weights have, and those in act-order only where they are restored
BIASES = {"attention_bias": True, "mlp_bias": True}
# Last names of matrices that have no site: tables of positions, routers, and biases of experts.
WITHOUT = {
    *("wpe", "gate", "router", "gate_up_proj_bias", "down_proj_bias", "e_score_correction_bias"),
}
GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.02}


def assembled(checkpoint: MemoryCheckpoint, quant: QuantConfig | None) -> Assembly:
    texts = [random_tokens(29, seed).tolist() for seed in range(4)]
    return assemble(checkpoint, BuildConfig(quant=quant, gate=None), Silent(), Calibration(texts))


def sites_of(assembly: Assembly) -> tuple[Site, ...]:
    """Sites of what will be an engine; its sections are not written yet, so they are not checked."""
    return msgspec.json.decode(assembly.files[ADAPTER_SITES], type=AdapterSites).sites


def unquantized(value: ir.Value) -> Array:
    """FLOAT numbers of a weight, before codes were chosen for them if the checkpoint has not only codes."""
    already = stored(value)
    if already is not None and already.source is not None:
        value = ir.Value(name="source", const_value=already.source, shape=value.shape)
    numbers: Array = open_rows(value)(0, shape_of(value)[0]).numpy()
    return numbers


def check_sites(
    checkpoint: MemoryCheckpoint, assembly: Assembly, weights: Mapping[str, torch.Tensor], rtol: float = 3e-7
) -> list[Site]:
    """Compares all sites; weights: name of a tensor → its numbers, [out, in] or [in, out]."""
    graph, named = assembly.dense.graph.initializers, {at: name for name, at in assembly.section_names.items()}
    is_transposed = checkpoint.config["model_type"] == "gpt2"

    sites = list(sites_of(assembly))
    tables = {site.weight: site.runs[0].module for site in sites if site.kind == "table"}
    tied = {
        site.runs[0].module: tables[site.weight] for site in sites if site.kind != "table" and site.weight in tables
    }

    def weight(module: str) -> Array:
        values = stored_matrix(weights, tied.get(module, module), checkpoint.config["model_type"] == "gpt_oss")
        numbers: Array = values.to(torch.bfloat16).float().numpy()
        return numbers.T if is_transposed and module not in {*tied, *tables.values()} else numbers

    for site in sites:
        expected = unquantized(graph[named[site.weight]])
        np.testing.assert_allclose(mapped(site, assembly.files, weight), expected, rtol, err_msg=site.weight)
        assert expected.shape == (site.matrices * site.rows, site.columns)
        if site.bias is not None:
            bias = mapped_bias(site, assembly.files, lambda module: weights[f"{module}.bias"].float().numpy())
            np.testing.assert_allclose(bias, unquantized(graph[named[site.bias]]), rtol, err_msg=site.bias)
    return sites


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, None),
    ("llama", BIASES, "int8-sq"),
    ("qwen2", {}, "int8-sq"),
    ("qwen3", {}, "int4-awq"),
    ("phi3", {}, "int8-sq"),
    ("gpt2", {}, "int8-sq"),
    ("gemma2", {}, "int4-gptq"),
    ("granite", GRANITE, "int4-rtn"),
    ("falcon_h1", {}, "int8-sq"),
    ("qwen3_next", {}, None),
    ("qwen3_moe", {}, "int8-sq"),
    ("deepseek_v3", {}, None),
    ("llama", {}, "fp8"),
]


@pytest.mark.parametrize(("family", "overrides", "quant"), CASES, ids=[f"{f}-{q}" for f, _, q in CASES])
def test_sites_make_weights_of_the_checkpoints_tensors(
    family: str, overrides: dict[str, Any], quant: str | None
) -> None:
    checkpoint = MemoryCheckpoint.tiny(family, **overrides)
    assembly = assembled(checkpoint, quant_config(quant) if quant else None)
    sites = check_sites(checkpoint, assembly, checkpoint.stored)
    head = head_of(assembly.dense)
    assert head is not None
    name = {at: name for name, at in assembly.section_names.items()}
    of_head = [site for site in sites if site.kind == "output_head"]
    assert [name[site.weight] for site in of_head] == [head.weight.name]
    assert [run.module for run in of_head[0].runs] == ["lm_head"]
    matrices = {
        name.removesuffix(".weight"): info.shape
        for name, info in checkpoint.tensors.items()
        if name.rpartition(".")[2] not in WITHOUT and name.removesuffix(".weight").rpartition(".")[2] not in WITHOUT
    }
    expected = {name for name, shape in matrices.items() if len(shape) == 2} | {
        matrix_name(name, expert)
        for name, shape in matrices.items()
        if len(shape) == 3 and shape[1] > 1  # not a convolution's
        for expert in range(shape[0])
    }
    assert expected | {"lm_head"} == {
        matrix_name(run.module, expert) if site.experts else run.module
        for site in sites
        for run in site.runs
        for expert in range(max(site.experts, 1))
    }
    if quant in ("int8-sq", "int4-awq"):
        assert any(site.column_factors for site in sites) and any(site.row_factors for site in sites)


def test_sites_of_engines_for_cpus_and_gpus() -> None:
    """Only engines with code for CPUs have sites of experts, heads, the output head and tables."""
    checkpoint = MemoryCheckpoint.tiny("deepseek_v3")
    of_cpu, of_gpu, of_both = (
        sites_of(assemble(checkpoint, BuildConfig(gate=None, targets=targets), Silent()))
        for targets in (("cpu",), ("cuda:sm_80",), ("cpu", "cuda:sm_80"))
    )
    assert of_cpu == of_both and any(site.experts for site in of_cpu) and any(site.heads for site in of_cpu)
    assert {site.kind for site in of_cpu} == {"linear", "output_head", "table"}
    assert of_gpu == tuple(site for site in of_cpu if site.matrices == 1 and site.kind == "linear")


@pytest.mark.parametrize("order", ["shared", "each"])
def test_sites_of_a_checkpoint_in_act_order(order: str) -> None:
    tiny = tiny_quantized(gptq(order=order), {**GPTQ, "desc_act": True}, mlp_bias=True)
    assembly = assembled(tiny.checkpoint, None)
    sites = check_sites(tiny.checkpoint, assembly, dict(tiny.model.state_dict()), ROUNDING)
    assert len(sites) == 4 * tiny.checkpoint.config["num_hidden_layers"] + 2
    ordered = [site.weight for site in sites if site.column_order]  # each o_proj and down_proj reads its input alone
    assert len(ordered) == len(sites) - 2 if order == "shared" else not any("qkv" in name for name in ordered)
    assert any(site.row_order for site in sites)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_sites_of_experts_that_are_stored_one_by_one(tmp_path: Path, family: str) -> None:
    """transformers saves the matrices of each expert by themselves, with other names."""
    saved(tiny_model(tiny_config(family)).to(torch.bfloat16), tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    stored_apart = MemoryCheckpoint(dict(checkpoint.config), tensors)
    assembly = assembled(stored_apart, quant_config("int8-sq"))
    sites = [site for site in check_sites(stored_apart, assembly, tensors) if site.experts]
    assert sites and all("experts.{}." in run.module for site in sites for run in site.runs)


def test_sites_of_a_gguf_file(tmp_path: Path) -> None:
    """Sites have transformers' names of layers and order of rows, which a GGUF file does not."""
    model = tiny_gguf.tiny_model("llama")
    path = tiny_gguf.write_model(tmp_path / "x.gguf", "llama", model).finish()
    config = BuildConfig(gate=None)
    assembly = assemble(open_checkpoint(str(path)), config, Silent())
    checkpoint = MemoryCheckpoint.of(model, model.config.to_dict())
    assert len(check_sites(checkpoint, assembly, checkpoint.stored, ROUNDING)) >= 4
