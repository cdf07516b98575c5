"""Checkpoints of NVIDIA's modelopt: FP8, integers of 8 and 4 bits, NVFP4, MXFP8 and MXFP4.

Tensors of a layer [N, K], by its dtypes:
    FLOAT8E4M3FN: `weight`, and `weight_scale` of all, of a row, of a block, or (UINT8) of 32 columns;
    INT8: `weight` and `weight_scale` [N];
    integers of 4 bits: `weight` UINT8 [N / 2, K], two rows a byte, and `weight_scale` [N, K / group];
    FP4: `weight` UINT8 [N, K / 2], `weight_scale` [N, K / 16] with `weight_scale_2`, one factor of all scales, or UINT8
    [N, K / 32].
`pre_quant_scale` [K], if there is one, multiplies the layer's input. The layouts are those of modelopt's
export/quant_utils.py.
"""

import torch

from enginewright.builder.checkpoint.quantized.bits import nibbles
from enginewright.builder.checkpoint.quantized.fit import (
    Groups,
    Open,
    by_rows,
    from_signed,
    integers,
    restore_integers,
    restored,
)
from enginewright.builder.checkpoint.quantized.format import FLOATS, QuantizedFormat
from enginewright.builder.checkpoint.quantized.fours import MX_GROUP, mxfp4_weight, nvfp4_weight
from enginewright.builder.checkpoint.quantized.grids import fp8_weight, take_scales
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.errors import EngineError
from enginewright.passes.weights import RowReader, RowsTensor

FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
INT8_WEIGHTS, INT8 = "W8A16", "W8A8_SQ_PER_CHANNEL"
INT4, NVFP4 = "W4A16_AWQ", ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
MXFP8, MXFP4 = "MXFP8", "MXFP4"
ALGORITHMS = (*FP8, INT8_WEIGHTS, INT8, INT4, *NVFP4, MXFP8, MXFP4)
BLOCK = 128  # rows and columns of a block of FP8_PB_WO
# Keys that repeat others: `config_groups` repeats quant_algo, and the tensors show what is excluded.
HARMLESS = ("config_groups", "exclude_modules", "ignore", "kv_cache_quant_algo", "kv_cache_scheme", "producer")
LEFT_OVER = (".input_scale", ".k_scale", ".v_scale", "k_proj.output_scale", "v_proj.output_scale")


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens a modelopt checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    algorithm = config.read(str, "quant_algo").upper()  # some files have small letters
    if algorithm not in ALGORITHMS:
        raise config.unsupported(f"quant_algo = {algorithm!r}", f"Implemented are {', '.join(ALGORITHMS)}.")
    group = config.read_size("group_size", default=BLOCK)
    if config.read(bool, "has_zero_point", default=False):
        raise config.unsupported("has_zero_point = True")
    config.read(bool, "pre_quant_scale", default=False)  # the tensors themselves show it
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return ModelOpt(tensors, algorithm, group)


class ModelOpt(QuantizedFormat):
    """Reader of modelopt's weights."""

    def __init__(self, tensors: Tensors, algorithm: str, group: int) -> None:
        super().__init__(tensors)
        self._algorithm, self._group = algorithm, group

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns a quantized weight; None if it is stored as in other checkpoints.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        info, module = self.tensors.find(name), name.removesuffix(".weight")
        if info is None or info.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.int8):
            return None
        if self.tensors.find(f"{module}.input_scale") is not None:
            self.note_static_activations()
        if self.tensors.find(f"{module}.pre_quant_scale") is not None:
            return self._with_input_scales(name, shape, f"{module}.pre_quant_scale")
        return self._weight(name, shape)

    def means_nothing(self, name: str) -> bool:
        """Checks if a tensor is a scale of activations or of the KV cache."""
        return name.endswith(LEFT_OVER)

    def _weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor:
        algorithm, scales = self._algorithm, f"{name}_scale"
        if algorithm in (INT8_WEIGHTS, INT8):
            codes = from_signed(by_rows(self.tensors.take(name, shape, dtypes=[torch.int8])), 8)
            groups = take_scales(self.tensors, scales, shape)
            return integers(self, name, shape, 8, codes, groups, 0 if algorithm == INT8 else None)
        if algorithm == INT4:
            return integers(self, name, shape, 4, *self._int4(name, shape))
        if algorithm in NVFP4:
            return nvfp4_weight(self, name, shape, name, f"{name}_scale_2", torch.mul)
        if algorithm == MXFP4:
            return mxfp4_weight(self, name, shape, name, scales)
        blocks = {"FP8_PB_WO": (self._group, self._group), MXFP8: (1, MX_GROUP)}
        activations = "bf16" if algorithm == "FP8_PB_WO" else "fp8"
        return fp8_weight(self, name, shape, scales, blocks.get(algorithm), activations)

    def _with_input_scales(self, name: str, shape: tuple[int, ...], scales: str) -> RowsTensor:
        """Restores a weight with the input's scales on its columns, so that the input itself is not scaled."""
        self.note("weights whose input is scaled (pre_quant_scale), which no kernel supports, are restored to bfloat16")
        of_columns = self.tensors.take(scales, (shape[1],), dtypes=FLOATS)
        int4 = self._algorithm == INT4  # the kernel's format would round scales
        unscaled = restore_integers(name, 4, *self._int4(name, shape)) if int4 else self._weight(name, shape).open

        def open() -> RowReader:
            read, factors = unscaled(), of_columns().float()
            return lambda begin, end: read(begin, end) * factors

        return restored(name, shape, open)

    def _int4(self, name: str, shape: tuple[int, ...]) -> tuple[Open, Groups]:
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
                return pairs[begin - 2 * first : end - 2 * first] ^ 8  # signed numbers plus 8

            return read

        return codes, scales
