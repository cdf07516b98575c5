"""Quantized checkpoints as folders and through the command; and those that cannot be read: refused, with nothing
written.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.cli import main
from enginewright.errors import EngineError
from enginewright.passes.quant import Int8Wo
from tests import tolerances
from tests.build.test_quantized_builds import build, error_of
from tests.helpers.quantized import AWQ, FP8, GPTQ, Tiny, compressed, mixed, tiny_case
from tests.helpers.tiny import tiny_checkpoint


def written(folder: Path, tiny: Tiny) -> Path:
    """The checkpoint as a folder."""
    path = tiny_checkpoint(folder, "llama")
    (path / "config.json").write_text(json.dumps(tiny.checkpoint.config))
    save_file({name: value.contiguous() for name, value in tiny.checkpoint.stored.items()}, path / "model.safetensors")
    return path


def test_the_command_takes_a_checkpoint_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, tiny_case("fp8, blocks"))
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["build", str(folder), "--quant", "int8-wo"])
    assert (
        refused.exit_code == 2
        and "quantized already, as fp8" in refused.stderr
        and "Leave --quant out" in refused.stderr
    )
    assert CliRunner().invoke(main, ["build", str(folder), "--group-size", "64"]).exit_code == 2
    assert list(tmp_path.iterdir()) == [folder]
    done = CliRunner().invoke(main, ["build", str(folder)])
    assert done.exit_code == 0
    assert "21 weights: FP8 in blocks of 32×48, which no kernel supports, is restored to bfloat16" in done.stderr
    assert (tmp_path / "tiny-llama-fp8.engine").exists()


def test_the_config_next_to_config_json_is_read(tmp_path: Path) -> None:
    """modelopt's, of checkpoints whose config.json says nothing."""
    tiny = tiny_case("modelopt")
    folder = written(tmp_path, tiny)
    bare = {key: value for key, value in tiny.checkpoint.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(bare))
    with pytest.raises(EngineError, match="float8_e4m3fn"):
        build_engine(open_checkpoint(str(folder)), BuildConfig(), tmp_path / "tiny.engine")
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    more = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(more))
    checkpoint = open_checkpoint(str(folder))
    build_engine(checkpoint, BuildConfig(), tmp_path / "tiny.engine")
    assert error_of(tiny, tmp_path / "tiny.engine") < tolerances.STORED_LOGITS["bf16"]
    assert "hf_quant_config.json" in checkpoint.source_hashes()


Q = "model.layers.1.self_attn.q_proj"


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda stored: stored.pop(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda stored: stored.update({name: change(stored[name])})


def nan(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values.view(-1)[3] = torch.nan
    return values


DAMAGED: list[tuple[str, Callable[[dict[str, torch.Tensor]], None], str, int]] = [
    ("gptq", without(f"{Q}.scales"), rf"no tensor {Q}\.scales", 1),
    ("gptq", without(f"{Q}.qzeros"), rf"no tensor {Q}\.qzeros", 1),
    ("gptq", without(f"{Q}.qweight"), rf"no tensor {Q}\.weight", 1),
    ("gptq", changed(f"{Q}.qweight", lambda words: words[:-1]), r"\[7, 64\].*\[8, 64\]", 1),
    ("gptq", changed(f"{Q}.scales", lambda scales: scales[:, 1:]), r"\[2, 63\].*\[2, 64\]", 1),
    ("gptq", changed(f"{Q}.scales", lambda scales: scales.int()), "stored as int32.*float16", 3),
    ("gptq", changed(f"{Q}.scales", nan), "NaN or infinity", 1),
    ("gptq", changed(f"{Q}.g_idx", lambda runs: runs + 1), "g_idx cannot be used.*not among the 2", 1),
    ("gptq", changed(f"{Q}.g_idx", lambda runs: runs - 1), "g_idx cannot be used.*not among the 2", 1),
    ("gptq", changed(f"{Q}.qzeros", lambda zeros: zeros + 1), 'symmetric.*not all 8.*Set "sym": false', 1),
    ("awq", without(f"{Q}.qzeros"), rf"no tensor {Q}\.qzeros", 1),
    ("awq", changed(f"{Q}.qweight", lambda words: words.t().contiguous()), r"\[8, 64\].*\[64, 8\]", 1),
    ("pack", without(f"{Q}.weight_scale"), rf"no tensor {Q}\.weight_scale", 1),
    ("pack", changed(f"{Q}.weight_scale", lambda scales: scales[:, :1]), r"\[64, 1\].*\[64, 2\]", 1),
    ("int", changed(f"{Q}.weight_scale", nan), "NaN or infinity", 1),
    ("float", without(f"{Q}.weight_scale"), rf"no tensor {Q}\.weight_scale", 1),
    ("float", changed(f"{Q}.weight", lambda codes: codes.view(torch.uint8).fill_(0x7F).view(codes.dtype)), "NaN", 1),
    ("fp8, blocks", without(f"{Q}.weight_scale_inv"), rf"no tensor {Q}\.weight_scale", 1),
    ("fp8, blocks", changed(f"{Q}.weight_scale_inv", lambda grid: grid[:1]), r"\[1, 2\].*\[2, 2\]", 1),
    ("fp8, blocks", changed(f"{Q}.weight", lambda codes: codes.view(torch.int8)), "stored as int8", 3),
    ("mxfp4", without(f"{Q}.weight_scales"), rf"no tensor {Q}\.weight_scales", 1),
    ("mxfp4", changed(f"{Q}.weight_scales", lambda powers: powers.fill_(255)), "NaN or infinity", 1),
]


@pytest.mark.parametrize(("name", "damage", "message", "exit_code"), DAMAGED)
def test_damaged_weights_are_named_and_leave_nothing(
    name: str, damage: Callable[[dict[str, torch.Tensor]], None], message: str, exit_code: int, tmp_path: Path
) -> None:
    tiny = tiny_case(name)
    stored = {key: value.clone() for key, value in tiny.checkpoint.stored.items()}
    damage(stored)
    tiny.checkpoint.stored = stored
    with pytest.raises(EngineError, match=f"(?s){message}") as error:
        build(tiny, tmp_path / "tiny.engine")
    assert error.value.exit_code == exit_code
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_is_cut_short(tmp_path: Path) -> None:
    folder = written(tmp_path, tiny_case("gptq"))
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    result = CliRunner().invoke(main, ["build", str(folder), "--output", str(tmp_path / "tiny.engine")])
    assert result.exit_code == 1 and "model.safetensors" in result.stderr and "cut short" in result.stderr
    assert list(tmp_path.iterdir()) == [folder]


WEIGHTS = {"num_bits": 4, "group_size": 32}
REFUSED: list[tuple[Mapping[str, Any], str, int]] = [
    ({"quant_method": "aqlm"}, "quant_method = 'aqlm'.*Implemented are awq, compressed-tensors, fp8, gptq", 3),
    ({"quant_method": "../gptq"}, "quant_method = '../gptq'", 3),
    ({"bits": 4}, "quant_method is missing", 1),
    ({**GPTQ, "bits": 5}, "bits = 5.*2, 3, 4, 8", 3),
    ({**GPTQ, "bits": "4"}, "bits is '4', not a int", 1),
    ({**GPTQ, "group_size": 0}, "group_size is 0", 1),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'", 3),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", 3),
    ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "dynamic", 3),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype = 'int16'", 3),
    ({**GPTQ, "rotation": "hadamard"}, "rotation = 'hadamard'", 3),
    ({**AWQ, "bits": 8}, "bits = 8", 3),
    ({**AWQ, "version": "GEMV"}, "version = 'gemv'", 3),
    ({**AWQ, "desc_act": True}, "desc_act = True", 3),
    ({**AWQ, "pack_dtype": "int16"}, "pack_dtype = 'int16'", 3),
    ({**AWQ, "backend": "llm-awq"}, "llm-awq", 3),
    ({**AWQ, "group_size": 96}, "not whole words and groups of 96", 1),
    ({**FP8, "fmt": "e5m2"}, "fmt = 'e5m2'", 3),
    ({**FP8, "activation_scheme": "block"}, "activation_scheme = 'block'", 3),
    ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]", 1),
    ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'", 3),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'", 3),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo = 'MIXED_PRECISION'", 3),
    ({"quant_method": "mxfp4", "swizzled": True}, "swizzled = True", 3),
    (compressed("marlin-24", **WEIGHTS), "format = 'marlin-24'", 3),
    (compressed("pack-quantized", num_bits=9), "num_bits = 9", 3),
    (compressed("pack-quantized", **WEIGHTS, strategy="row"), "strategy = 'row'", 3),
    (compressed("pack-quantized", **WEIGHTS, type="posit"), "type = 'posit'", 3),
    (compressed("pack-quantized", **WEIGHTS, rounding="up"), "rounding = 'up'", 3),
    ({**compressed("pack-quantized", **WEIGHTS), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity", 3),
    ({**compressed("pack-quantized", **WEIGHTS), "transform_config": {"u": {"type": "hadamard"}}}, "transform", 3),
    ({**compressed("pack-quantized", **WEIGHTS), "config_groups": None}, "config_groups is missing", 1),
    (mixed({"4": ["re:(a+)+$"], "3": ["Linear"]}), "could take long", 3),
    (mixed({"4": ["re:.*.*.*.*.*"], "3": ["Linear"]}), "could take long", 3),
    (mixed({"4": ["re:("], "3": ["Linear"]}), "not a regular expression", 1),
    (mixed({"4": ["re:.*mlp.*"], "3": ["re:.*attention.*"]}), "no group of config_groups has it", 1),
]


@pytest.mark.parametrize(("config", "message", "exit_code"), REFUSED)
def test_variants_that_are_not_implemented_are_refused_by_name(
    config: Mapping[str, Any], message: str, exit_code: int, tmp_path: Path
) -> None:
    tiny = tiny_case("pack" if config.get("quant_method") == "compressed-tensors" else "awq")
    tiny.checkpoint.config = {**tiny.checkpoint.config, "quantization_config": config}
    with pytest.raises(EngineError, match=f"(?s){message}") as error:
        build(tiny, tmp_path / "tiny.engine")
    assert error.value.exit_code == exit_code
    assert list(tmp_path.iterdir()) == []
    assert tiny.checkpoint.reads == []


def test_a_method_is_refused_with_such_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--quant int8-wo is not possible") as error:
        build_engine(tiny_case("gptq").checkpoint, BuildConfig(quant=Int8Wo()), tmp_path / "tiny.engine")
    assert error.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
