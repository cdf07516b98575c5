"""Checkpoints of NVIDIA's modelopt: FP8 with one scale a weight, a row, or a block; integers of 4 bits; NVFP4.

Of a layer [N, K]: `weight` FLOAT8E4M3FN and `weight_scale`; or `weight` UINT8 [N / 2, K], two rows a byte, and
`weight_scale` [N, K / group]; or `weight` UINT8 [N, K / 2], `weight_scale` FLOAT8E4M3FN [N, K / 16], and
`weight_scale_2`, one factor of all scales. The layouts are those of modelopt's export/quant_utils.py.
"""

import torch

from enginewright.builder.checkpoint.quantized.bits import nibbles
from enginewright.builder.checkpoint.quantized.fit import integers
from enginewright.builder.checkpoint.quantized.format import Format
from enginewright.builder.checkpoint.quantized.fours import nvfp4_weight
from enginewright.builder.checkpoint.quantized.grids import fp8_weight, take_scales
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.passes.weights import RowReader, RowsTensor

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
INT4, NVFP4 = ("W4A16_AWQ",), ("NVFP4", "W4A16_NVFP4")
BLOCK = 128  # rows and columns of FP8_PB_WO's
# What other keys say as well: `config_groups` repeats quant_algo, and the tensors tell what is excluded.
HARMLESS = ("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer")
LEFT_OVER = (".input_scale", ".k_scale", ".v_scale", "k_proj.output_scale", "v_proj.output_scale")


def open(config: ConfigReader, tensors: Tensors) -> Format:
    algorithm = config.read(str, "quant_algo")
    if algorithm not in (*FP8, *INT4, *NVFP4):
        raise config.unsupported(f"quant_algo = {algorithm!r}", f"Implemented are {', '.join((*FP8, *INT4, *NVFP4))}.")
    group = config.read_size("group_size", default=BLOCK)
    if config.read(bool, "has_zero_point", default=False):
        raise config.unsupported("has_zero_point = True")
    config.read(bool, "pre_quant_scale", default=False)  # where one is left, the tensors tell
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return ModelOpt(tensors, algorithm, group)


class ModelOpt(Format):
    def __init__(self, tensors: Tensors, algorithm: str, group: int) -> None:
        super().__init__(tensors)
        self._algorithm, self._group = algorithm, group

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        info, module = self.tensors.find(name), name.removesuffix(".weight")
        if info is None or info.dtype not in (torch.float8_e4m3fn, torch.uint8):
            return None
        if self.tensors.find(f"{module}.pre_quant_scale") is not None:
            raise UnsupportedModelError(
                f"{module}.pre_quant_scale is not implemented",
                "activations would have to be multiplied by it",
                "Export with scales that are folded into the layers before.",
            )
        if self._algorithm in NVFP4:
            return nvfp4_weight(self, name, shape, name, f"{name}_scale_2", torch.mul)
        if self._algorithm in INT4:
            return self._int4(name, shape)
        if self.tensors.find(f"{module}.input_scale") is not None:
            self.note_static_activations()
        if self._algorithm == "FP8_PB_WO":  # weights only
            return fp8_weight(self, name, shape, f"{name}_scale", (self._group, self._group), "bf16")
        return fp8_weight(self, name, shape, f"{name}_scale", None, "fp8")

    def means_nothing(self, name: str) -> bool:
        return name.endswith(LEFT_OVER)

    def _int4(self, name: str, shape: tuple[int, ...]) -> RowsTensor:
        rows, columns = shape
        if rows % 2:
            raise EngineError(f"{name} cannot be used", f"its rows are stored in pairs, and it should have {rows}")
        packed = self.tensors.take(name, (rows // 2, columns), dtypes=[torch.uint8])
        scales = take_scales(self.tensors, f"{name}_scale", shape, (1, self._group))

        def codes() -> RowReader:
            values = packed()

            def read(begin: int, end: int) -> torch.Tensor:
                first = begin // 2
                pairs = nibbles(values[first : -(-end // 2)].t()).t()
                return pairs[begin - 2 * first : end - 2 * first] ^ 8  # signed numbers, and 8 more

            return read

        return integers(self, name, shape, 4, codes, scales)
