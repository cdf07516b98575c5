"""Quantized weights from our readers, against those that the libraries that packed them restore."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from enginewright.builder.checkpoint.quantized import QuantizedFormat, read_format
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.errors import EngineError
from enginewright.passes.quant import W8A8, Fp8, Int4Rtn, Int8Wo, Mxfp4, QuantConfig
from enginewright.passes.quant.act_order import ActOrdered
from enginewright.passes.quant.method import StoredTensor
from enginewright.passes.weights import RowsTensor
from tests import tolerances
from tests.helpers.quantized import awq, fp4, fp8, gptq, pack_quantized
from tests.helpers.tiny import MemoryCheckpoint

PATH = Path(__file__).parents[1] / "golden" / "quantized.safetensors"


def golden_names() -> list[str]:
    with safe_open(PATH, framework="pt") as file:
        return list(json.loads(file.metadata()["configs"]))


def golden(name: str) -> tuple[Mapping[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The quantization_config, what is stored, and what the library restores."""
    with safe_open(PATH, framework="pt") as file:
        stored = {
            key.removeprefix(f"{name}/"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118 (safe_open is no mapping)
            if key.startswith(f"{name}/")
        }
        return json.loads(file.metadata()["configs"])[name], stored, stored.pop("=")


def opened(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[RowsTensor, QuantizedFormat]:
    """A weight `layer.weight` of which this is stored, and its format."""
    checkpoint = MemoryCheckpoint({}, {f"layer.{name}": value for name, value in stored.items()})
    format = read_format(ConfigReader({"quantization_config": config}), Tensors(checkpoint))
    assert format is not None
    weight = format.weight("layer.weight", shape)
    assert weight is not None
    left_over = [name for name in checkpoint.stored if name not in format.tensors.taken]
    assert all(format.means_nothing(name) for name in left_over), left_over
    return weight, format


def values_of(weight: RowsTensor) -> torch.Tensor:
    """All of it, read by pieces of odd sizes."""
    rows = int(weight.shape[0])
    read = weight.open()
    return torch.cat([read(begin, min(begin + 5, rows)) for begin in range(0, rows, 5)])


def form_of(weight: RowsTensor) -> QuantConfig | None:
    return weight.stored_as if isinstance(weight, StoredTensor) else None


@pytest.mark.parametrize("name", golden_names())
def test_weights_are_what_their_producer_restores(name: str) -> None:
    config, stored, expected = golden(name)
    weight, _ = opened(config, stored, tuple(expected.shape))
    actual = values_of(weight)
    if form_of(weight) is None:
        assert torch.equal(actual, expected.bfloat16().float())
        return
    # Codes are the same, and scales are rounded; a code of -128 is -127.
    bound = tolerances.STORED_SCALES + (1 / 128 if isinstance(form_of(weight), Int8Wo) else 0)
    assert ((actual - expected.float()).abs() <= bound * expected.float().abs()).all()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("compressed-tensors/pack 4 bits, symmetric", Int4Rtn(32)),
        ("compressed-tensors/pack 4 bits, with zero points", Int4Rtn(32, zero_points=True)),
        ("compressed-tensors/pack 3 bits, symmetric", Int4Rtn(32)),
        ("compressed-tensors/pack 8 bits, symmetric", None),
        ("compressed-tensors/pack 4 bits, by rows", Int4Rtn(0)),
        ("compressed-tensors/int8", Int8Wo()),
        ("compressed-tensors/int8, zero points", None),
        ("compressed-tensors/int4 unpacked", Int4Rtn(32)),
        ("compressed-tensors/fp8", Fp8(fp8_activations="bf16")),
        ("compressed-tensors/fp8 by rows", Fp8(fp8_activations="bf16")),
        ("compressed-tensors/fp8 blocks", None),
        ("compressed-tensors/mxfp4", Mxfp4()),
        ("gptq/4 bits, symmetric, 32", Int4Rtn(32)),
        ("gptq/4 bits, zero points, 32", Int4Rtn(32, zero_points=True)),
        ("gptq/4 bits, symmetric, -1", Int4Rtn(0)),
        ("gptq/3 bits, zero points, 32", Int4Rtn(32, zero_points=True)),
        ("gptq/2 bits, symmetric, 32", Int4Rtn(32)),
        ("gptq/8 bits, symmetric, -1", Int8Wo()),
        ("awq/gemm", Int4Rtn(32, zero_points=True)),
        ("modelopt/FP8_DEFAULT_CFG", Fp8()),
        ("modelopt/FP8_PER_CHANNEL_PER_TOKEN_CFG", Fp8()),
        ("modelopt/FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", Fp8(fp8_activations="bf16")),
        ("modelopt/INT4_BLOCKWISE_WEIGHT_ONLY_CFG", Int4Rtn(128)),
        ("modelopt/INT4_AWQ_CFG", None),
        ("modelopt/INT8_WEIGHT_ONLY_CFG", Int8Wo()),
        ("modelopt/INT8_DEFAULT_CFG", W8A8(0)),
        ("modelopt/INT8_SMOOTHQUANT_CFG", None),
        ("modelopt/NVFP4_DEFAULT_CFG", None),
        ("modelopt/MXFP8_DEFAULT_CFG", None),
        ("modelopt/MXFP4_DEFAULT_CFG", Mxfp4()),
    ],
)
def test_weights_keep_the_form_that_a_kernel_has(name: str, form: QuantConfig | None) -> None:
    config, stored, expected = golden(name)
    weight, format = opened(config, stored, tuple(expected.shape))
    assert form_of(weight) == form
    assert (form is None) == any("restored to bfloat16" in note for note in format.notes)


def test_a_format_without_a_kernel_is_named_in_a_note() -> None:
    config, stored, expected = golden("compressed-tensors/fp8 blocks")
    _, format = opened(config, stored, tuple(expected.shape))
    assert dict(format.notes) == {"FP8 in blocks of 16×32, which no kernel supports, is restored to bfloat16": 1}


def test_activations_of_nvfp4_are_read() -> None:
    config, stored, expected = golden("compressed-tensors/nvfp4")
    activations = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    group = {**config["config_groups"]["group_0"], "input_activations": activations}
    weight, _ = opened({**config, "config_groups": {"group_0": group}}, stored, tuple(expected.shape))
    assert torch.equal(values_of(weight), expected.bfloat16().float())


def test_zero_points_beyond_the_codes_are_refused() -> None:
    stored = dict(pack_quantized(symmetric=False)(random_weight(8, 64), torch.Generator()).stored)
    stored["weight_zero_point"] = torch.full((8, 2), 9, dtype=torch.int8)
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": False}}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    weight, _ = opened(config, stored, (8, 64))
    with pytest.raises(EngineError, match="codes of more than 4 bits"):
        values_of(weight)


def random_weight(rows: int, columns: int) -> torch.Tensor:
    """Some rows are above 0, so that their zero points are 0."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight[3::7] = weight[3::7].abs()
    return weight


GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_zero_points_of_both_versions(bits: int, version: int) -> None:
    """GPTQModel makes version 1 of version 2 by whole words: a zero point of 0 borrows from the next one."""
    weight = random_weight(64, 96)
    packed = gptq(bits, 32, symmetric=False, version=version)(weight, torch.Generator())
    config = {**GPTQ, "bits": bits, "sym": False, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    actual = values_of(opened(config, packed.stored, (64, 96))[0])
    assert torch.equal(actual, packed.weight if bits < 8 else packed.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("columns", "group", "run"),
    [(160, 64, 64), (96, 128, 0), (96, -1, 0), (1088, 1024, 512), (640, 320, 320), (1152, 576, 288), (96, 48, None)],
)
def test_runs_that_kernels_take_and_others(columns: int, group: int, run: int | None) -> None:
    """A longer run is divided; one that no kernel's fits is restored. The last one of a row may be shorter."""
    packed = gptq(4, group, symmetric=False)(random_weight(8, columns), torch.Generator())
    config = {**GPTQ, "bits": 4, "sym": False, "group_size": group}
    weight, _ = opened(config, packed.stored, (8, columns))
    assert form_of(weight) == (None if run is None else Int4Rtn(run, zero_points=True))
    expected = packed.weight if run is not None else packed.weight.bfloat16().float()
    assert torch.equal(values_of(weight), expected)


def test_act_order_is_sorted_and_can_be_read_unsorted() -> None:
    packed = gptq(order="each")(random_weight(32, 96), torch.Generator().manual_seed(0))
    weight, _ = opened({**GPTQ, "bits": 4, "desc_act": True}, packed.stored, (32, 96))
    assert isinstance(weight, ActOrdered)
    assert torch.equal(values_of(weight), packed.weight.bfloat16().float())
    assert torch.equal(values_of(weight.by_groups), packed.weight[:, weight.order])
    assert weight.by_groups.stored_as == Int4Rtn(32)


@pytest.mark.parametrize("pack", [awq(), pack_quantized(symmetric=False), pack_quantized(5, -1)])
def test_odd_rows_and_pieces(pack: Any) -> None:
    """Rows that are no whole pieces, and codes of five bits, which words divide."""
    rows = 40
    packed = pack(random_weight(rows, 96), torch.Generator())
    group = (
        {"num_bits": 5, "strategy": "channel"}
        if len(packed.stored) == 3 and "weight_packed" in packed.stored
        else {"num_bits": 4, "group_size": 32, "symmetric": False}
    )
    config: Mapping[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    if "weight_packed" in packed.stored:
        groups = {"group_0": {"targets": ["Linear"], "weights": group}}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    weight, _ = opened(config, packed.stored, (rows, 96))
    assert torch.equal(values_of(weight), packed.weight)


def test_int8_codes_that_kernels_cannot_take() -> None:
    """-128 is beyond what AVX2's products can; a step less changes it by 1 in 128."""
    codes = torch.tensor([[-128, -127, 0, 127]] * 3, dtype=torch.int8)
    config, _, _ = golden("compressed-tensors/int8")
    weight, _ = opened(config, {"weight": codes, "weight_scale": torch.full((3, 1), 0.5)}, (3, 4))
    assert torch.equal(values_of(weight), codes.clamp(min=-127) * 0.5)


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("powers", [False, True])
def test_blocks_of_fp8_are_restored_as_by_transformers(powers: bool) -> None:
    packed = fp8((128, 128), scale="weight_scale_inv")(random_weight(256, 384), torch.Generator())
    stored = dict(packed.stored)
    if powers:
        stored["weight_scale_inv"] = stored["weight_scale_inv"].to(torch.float8_e8m0fnu)
    config = {**DEEPSEEK, "scale_fmt": "ue8m0"} if powers else DEEPSEEK
    weight, _ = opened(config, stored, (256, 384))
    oracle = Fp8Dequantize(None)._dequantize_one(stored["weight"], stored["weight_scale_inv"], torch.float32)
    assert torch.equal(values_of(weight), oracle)
    assert form_of(weight) == Fp8(fp8_scales="block")


@pytest.mark.parametrize(
    ("block", "form"),
    [
        ((128, 128), Fp8(fp8_scales="block")),
        ((64, 256), Fp8(fp8_scales="block")),
        ((1, 128), Fp8(fp8_scales="block")),
        ((128, 300), Fp8()),
        ((128, 64), None),
    ],
)
def test_blocks_of_fp8_that_a_weight_does_not_fill(block: tuple[int, int], form: QuantConfig | None) -> None:
    packed = fp8(block, scale="weight_scale_inv")(random_weight(136, 300), torch.Generator())
    weight, format = opened({**DEEPSEEK, "weight_block_size": [*block]}, packed.stored, (136, 300))
    assert form_of(weight) == form
    assert torch.equal(values_of(weight), packed.weight if form else packed.weight.bfloat16().float())
    assert bool(format.notes) == (form is None)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_of_fp8_is_every_rows(shape: tuple[int, ...]) -> None:
    packed = fp8(scale="weight_scale", shape=shape)(random_weight(24, 40), torch.Generator())
    static = {**packed.stored, "input_scale": torch.tensor(0.1)}
    weight, format = opened({"quant_method": "fp8", "activation_scheme": "static"}, static, (24, 40))
    assert form_of(weight) == Fp8()
    assert torch.equal(values_of(weight), packed.weight)
    assert any("static scales" in note for note in format.notes)


def test_mxfp4_is_what_transformers_restores() -> None:
    packed = fp4(("weight_blocks", "weight_scales"), 32, blocks=True)(random_weight(24, 96), torch.Generator())
    weight, _ = opened({"quant_method": "mxfp4"}, packed.stored, (24, 96))
    blocks, scales = packed.stored["weight_blocks"], packed.stored["weight_scales"]
    oracle = convert_moe_packed_tensors(blocks[None], scales[None])[0].t()
    assert form_of(weight) == Mxfp4()
    assert torch.equal(values_of(weight), oracle.float())
    assert torch.equal(values_of(weight), packed.weight)


def test_mxfp4_of_every_power_and_of_a_last_run_that_is_shorter() -> None:
    """Each code in each row; the last row's power is the NaN of E8M0."""
    codes = torch.arange(40) % 16
    stored = {
        "weight_packed": (codes[::2] | codes[1::2] << 4).to(torch.uint8).expand(256, 20),
        "weight_scale": torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 2),
    }
    config, _, _ = golden("compressed-tensors/mxfp4")
    weight, _ = opened(config, stored, (256, 40))
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    powers = 2.0 ** torch.arange(-127, 126, dtype=torch.float64)[:, None]
    read = weight.open()
    assert torch.equal(read(0, 253).double(), torch.cat((numbers, -numbers))[codes] * powers)
    with pytest.raises(EngineError, match="NaN or infinity"):
        read(255, 256)


MODELOPT: list[tuple[str, Any]] = [
    ("FP8", fp8()),
    ("FP8_PER_CHANNEL_PER_TOKEN", fp8(by_row=True)),
    ("FP8_PB_WO", fp8((128, 128))),
    ("NVFP4", fp4(("weight", "weight_scale"), 16, "weight_scale_2")),
]


@pytest.mark.parametrize(("algorithm", "pack"), MODELOPT, ids=[name for name, _ in MODELOPT])
def test_modelopt(algorithm: str, pack: Any) -> None:
    packed = pack(random_weight(136, 192), torch.Generator())
    group = 16 if algorithm == "NVFP4" else 128
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": group, "ignore": ["lm_head"]}
    weight, _ = opened(config, packed.stored, (136, 192))
    alone = Fp8(fp8_scales="block", fp8_activations="bf16")
    forms = {"FP8": Fp8(), "FP8_PER_CHANNEL_PER_TOKEN": Fp8(), "FP8_PB_WO": alone}
    expected = packed.weight if algorithm in forms else packed.weight.bfloat16().float()
    assert form_of(weight) == forms.get(algorithm)
    assert torch.equal(values_of(weight), expected)


def test_modelopts_integers() -> None:
    """Two rows a byte, the even one in the low half, each a signed number. By modelopt's pack_int4_in_uint8."""
    scales = random_weight(24, 3).abs()
    numbers = torch.randint(-8, 8, (24, 96), generator=torch.Generator().manual_seed(1))
    packed = ((numbers[::2] & 15) | (numbers[1::2] & 15) << 4).to(torch.uint8)
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}
    weight, _ = opened(config, {"weight": packed, "weight_scale": scales}, (24, 96))
    assert form_of(weight) == Int4Rtn(32)
    assert torch.equal(values_of(weight), numbers * scales.bfloat16().float().repeat_interleave(32, 1))


@pytest.mark.parametrize(
    ("activations", "form"),
    [
        ({"num_bits": 8, "strategy": "token", "dynamic": True}, W8A8(0)),
        ({"num_bits": 8, "strategy": "tensor", "dynamic": False}, W8A8(0)),
        ({"num_bits": 8, "strategy": "group", "group_size": 64, "dynamic": True}, W8A8(64)),
        ({"num_bits": 8, "strategy": "group", "group_size": 48, "dynamic": True}, W8A8(0)),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, Int8Wo()),
    ],
)
def test_activations_of_int8_weights(activations: Mapping[str, Any], form: QuantConfig) -> None:
    config, stored, expected = golden("compressed-tensors/int8")
    group = {**config["config_groups"]["group_0"], "input_activations": activations}
    weight, format = opened({**config, "config_groups": {"group_0": group}}, stored, tuple(expected.shape))
    assert form_of(weight) == form
    assert bool(format.notes) == (not activations["dynamic"])


@pytest.mark.parametrize(
    ("activations", "form"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, Fp8()),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, Fp8()),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, Fp8(fp8_activations="bf16")),
    ],
)
def test_activations_of_fp8_weights(activations: Mapping[str, Any], form: QuantConfig) -> None:
    config, stored, expected = golden("compressed-tensors/fp8 by rows")
    group = {**config["config_groups"]["group_0"], "input_activations": activations}
    weight, format = opened({**config, "config_groups": {"group_0": group}}, stored, tuple(expected.shape))
    assert form_of(weight) == form
    assert bool(format.notes) == (not activations["dynamic"])
