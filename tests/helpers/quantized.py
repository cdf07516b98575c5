"""Quantized checkpoints of tiny models, packed by what is published of each format, and what their weights stand for.

Nothing here is the builder's: it is written from the producers' descriptions, number by number where that is short.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

Tensors = dict[str, torch.Tensor]
# Heads, sizes and groups that all formats can have: rows in eights, columns in 32s.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Packed:
    """One quantized weight: its stored tensors, by the part of their names after the module's, and its values."""

    stored: Mapping[str, torch.Tensor]
    weight: torch.Tensor  # FLOAT [N, K]


Pack = Callable[[torch.Tensor, torch.Generator], Packed]


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """INT32 [rows, words] of codes [rows, n]: one after the other from the lowest bit of the first word on."""
    rows = []
    for row in codes.tolist():
        whole = sum(int(code) << index * bits for index, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(whole >> 32 * word) & 0xFFFFFFFF for word in range(count)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], scales FLOAT16 [N, G] that bfloat16 holds, and zeros [N, G]."""
    rows, columns = weight.shape
    groups = -(-columns // group)
    of_column = torch.arange(columns) // group
    runs = [weight[:, of_column == index] for index in range(groups)]
    low, high = (torch.stack([f(run, 1) for run in runs], 1) for f in (torch.amin, torch.amax))
    middle, largest = 1 << bits - 1, (1 << bits) - 1
    if symmetric:
        scales = torch.maximum(low.abs(), high.abs()) / (middle - 0.5)
        zeros = torch.full((rows, groups), middle)
    else:
        scales = (high.clamp(min=0) - low.clamp(max=0)) / largest
        zeros = (-low.clamp(max=0) / scales).round().clamp(0, largest).int()
    scales = scales.bfloat16().half()
    codes = (weight / scales.float()[:, of_column] + zeros[:, of_column]).round().clamp(0, largest).int()
    return codes, scales, zeros


def restored(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, of_column: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, of_column]).double().mul(scales.double()[:, of_column]).float()


def down(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """`words_of` along the other axis: INT32 [words, columns] of codes [n, columns]."""
    return words_of(codes.t(), bits).t().contiguous()


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1, order: str = "") -> Pack:
    """order: that in which columns are quantized: "", as they stand; "shared", one for all weights of that width, as
    GPTQ's is one for all layers that read the same; "each", one for each weight.
    """

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        source = torch.Generator().manual_seed(columns) if order == "shared" else generator
        permutation = torch.randperm(columns, generator=source) if order else torch.arange(columns)
        codes, scales, zeros = grouped(weight[:, permutation], bits, size, symmetric)
        back = torch.argsort(permutation)
        codes, of_column = codes[:, back], (torch.arange(columns) // size)[back]
        stored = {
            "qweight": down(codes.t(), bits),
            "qzeros": words_of(zeros.t(), bits) if version == 2 else _zeros_of_version_1(zeros.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": of_column.int(),
        }
        return Packed(stored, restored(codes, scales, zeros, of_column))

    return pack


def _zeros_of_version_1(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Zeros in the v1 format, by GPTQModel's convert_gptq_v2_to_v1_format: 1 less, taken from whole words where `bits`
    divides 32.
    """
    if 32 % bits:
        return words_of(zeros - 1 & (1 << bits) - 1, bits)
    return words_of(zeros, bits) - sum(1 << bit for bit in range(0, 32, bits))


def awq(group: int = 32) -> Pack:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        codes, scales, zeros = grouped(weight, 4, group, symmetric=False)
        stored = {
            "qweight": words_of(_in_awq_order(codes.t()), 4),
            "qzeros": words_of(_in_awq_order(zeros.t()), 4),
            "scales": scales.t().contiguous(),
        }
        return Packed(stored, restored(codes, scales, zeros, torch.arange(weight.shape[1]) // group))

    return pack


def _in_awq_order(codes: torch.Tensor) -> torch.Tensor:
    """Reorders each eight codes: those at even positions, then those at odd ones."""
    return codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)


def pack_quantized(bits: int = 4, group: int = 32, symmetric: bool = True) -> Pack:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = grouped(weight, bits, size, symmetric)
        stored = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
            **({} if symmetric else {"weight_zero_point": down(zeros, bits)}),
        }
        return Packed(stored, restored(codes, scales, zeros, torch.arange(weight.shape[1]) // size))

    return pack


def int_quantized(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """Int8 with a scale for each row; codes are at least -127, as in most rows."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-127, 127)
    return Packed({"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float())


def fp8(
    block: tuple[int, int] | None = None, by_row: bool = False, scale: str = "weight_scale", shape: tuple[int, ...] = ()
) -> Pack:
    """FP8 with a scale for each block, each row, or all. shape: that of a single scale."""

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        rows, columns = weight.shape
        height, width = block or (1 if by_row else rows, columns)
        grid = torch.tensor(
            [
                [weight[row : row + height, column : column + width].abs().max() for column in range(0, columns, width)]
                for row in range(0, rows, height)
            ]
        )
        scales = grid / 448
        whole = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        values = (weight / whole).to(torch.float8_e4m3fn)
        stored = scales if block or by_row else scales.reshape(shape)
        return Packed({"weight": values, scale: stored}, values.float() * whole)

    return pack


def fp4(names: tuple[str, str], run: int, factor: str = "", blocks: bool = False) -> Pack:
    """MXFP4 (run 32) and NVFP4 (run 16). names: of packed numbers and of their scales. factor: of the scale of all."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor([*table, *(-number for number in table)])

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        runs = weight.view(len(weight), -1, run)
        largest = runs.abs().amax(2)
        if factor:
            of_all = largest.max() / (6 * 448)
            stored_scales = (largest / 6 / of_all).to(torch.float8_e4m3fn)
            scales = stored_scales.float() * of_all
        else:
            exponents = largest.log2().floor() - 2
            stored_scales, scales = (exponents + 127).to(torch.uint8), 2**exponents
        codes = ((runs / scales[..., None])[..., None] - numbers).abs().argmin(-1)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored = {names[0]: packed if blocks else packed.flatten(1), names[1]: stored_scales}
        if factor:
            stored[factor] = of_all.reciprocal().view(1) if "global" in factor else of_all
        return Packed(stored, (numbers[codes] * scales[..., None]).flatten(1))

    return pack


@dataclass(frozen=True)
class Tiny:
    """A tiny llama whose layers are quantized, and the same with what they stand for."""

    checkpoint: MemoryCheckpoint
    model: Any  # transformers'


def tiny_quantized(pack: Pack | Mapping[str, Pack], quantization: Mapping[str, Any], **overrides: Any) -> Tiny:
    """pack: of all linear layers but the head, or by the last names of those that are quantized."""
    config = tiny_config("llama", **{**SIZES, **overrides})
    model = tiny_model(config)
    generator = torch.Generator().manual_seed(7)
    parameters = dict(model.named_parameters())
    stored = dict(MemoryCheckpoint.of(model, config).stored)
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        own = pack.get(last) if isinstance(pack, Mapping) else pack if last.endswith("_proj") else None
        if own is None or kind != "weight":
            continue
        packed = own(parameter.detach(), generator)
        del stored[name]
        stored |= {f"{module}.{end}": value for end, value in packed.stored.items()}
        parameter.data.copy_(packed.weight)
    return Tiny(MemoryCheckpoint({**config, "quantization_config": quantization}, stored), model)


# quantization_config as their producers write it.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> Mapping[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


# The keys that transformers writes in addition.
AWQ_OF_TRANSFORMERS = {
    **{key: value for key, value in AWQ.items() if key != "version"},
    **{"format": "gemm", "version": "gemm", "sym": True, "desc_act": False, "damp_percent": 0.1, "tokenizer": None},
    **{"modules_to_not_convert": None, "backend": "auto", "batch_size": 1, "cache_block_outputs": True},
}

# Name → how layers are packed, the config that says so, and which arithmetic the layers have in the engine.
CASES: dict[str, tuple[Pack, Mapping[str, Any], str]] = {
    "gptq": (gptq(), GPTQ, "int4"),
    "gptq, zero points": (gptq(symmetric=False, group=64), {**GPTQ, "sym": False, "group_size": 64}, "int4"),
    "gptq, 3 bits by rows": (gptq(3, -1), {**GPTQ, "bits": 3, "group_size": -1}, "int4"),
    "gptq, 8 bits": (gptq(8), {**GPTQ, "bits": 8}, "bf16"),
    "gptq, 8 bits by rows": (gptq(8, -1), {**GPTQ, "bits": 8, "group_size": -1}, "bf16"),
    "awq": (awq(), AWQ_OF_TRANSFORMERS, "int4"),
    "pack": (pack_quantized(), compressed("pack-quantized", num_bits=4, group_size=32), "int4"),
    "int": (int_quantized, compressed("int-quantized", BY_TOKEN, num_bits=8, strategy="channel"), "int8"),
    "float": (fp8(by_row=True), compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "bf16"),
    "naive": (fp8(shape=(1,)), compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), "bf16"),
    "fp8, blocks": (fp8((32, 48), scale="weight_scale_inv"), FP8, "bf16"),
    "modelopt": (fp8(), {"quant_method": "modelopt", "quant_algo": "FP8"}, "bf16"),
    "mxfp4": (fp4(("weight_blocks", "weight_scales"), 32, blocks=True), {"quant_method": "mxfp4"}, "int4"),
}


@cache
def _tiny(name: str) -> Tiny:
    pack, config, _ = CASES[name]
    return tiny_quantized(pack, config)


def tiny_case(name: str) -> Tiny:
    """A tiny case with a checkpoint of its own, whose count of reads begins at zero."""
    tiny = _tiny(name)
    return Tiny(MemoryCheckpoint(tiny.checkpoint.config, tiny.checkpoint.stored), tiny.model)


def mixed(targets: Mapping[str, list[str]]) -> Mapping[str, Any]:
    groups = {
        name: {"targets": own, "format": "pack-quantized", "weights": {"num_bits": int(name), "group_size": 32}}
        for name, own in targets.items()
    }
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
