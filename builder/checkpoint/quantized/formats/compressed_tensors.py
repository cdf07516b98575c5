"""compressed-tensors checkpoints of llm-compressor: `config_groups` assign a format to each layer.

Tensors of a layer [N, K], by format:
    int-, naive-, float-quantized: `weight` INT8 or FLOAT8E4M3FN, `weight_scale`, `weight_zero_point`;
    pack-quantized: `weight_packed` INT32, codes packed along K, `weight_scale`, `weight_zero_point` packed along N;
    mxfp8-quantized: `weight` FLOAT8E4M3FN, `weight_scale` UINT8, exponents of two;
    mxfp4-, nvfp4-pack-quantized: `weight_packed` UINT8, `weight_scale`, and for the latter `weight_global_scale`.
Integers are signed: (integer - zero) · scale. The layouts are those of compressed-tensors' compressors.
"""

import torch

from enginewright.builder.checkpoint.quantized.bits import unpack, words_for
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, by_columns, by_rows, from_signed
from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.builder.checkpoint.quantized.fours import mxfp4_weight, nvfp4_weight
from enginewright.builder.checkpoint.quantized.g_idx import integers_by_g_idx
from enginewright.builder.checkpoint.quantized.grids import fp8_weight, take_grid, take_scales
from enginewright.builder.checkpoint.quantized.schemes import QuantizationArgs, Scheme, Schemes, read_schemes
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.passes.weights import RowReader, RowsTensor

# Formats that can be read.
FORMS = (
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "pack-quantized",
    "mxfp8-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
MIXED = ("mixed-precision", "dense")  # each group of layers has its own; no layer is quantized
HARMLESS = (
    "dequantize",
    "global_compression_ratio",
    "ignore",
    "quantization_status",
    "run_compressed",
    "use_optimized_inference",
    "version",
)
# Ends of the names of activations' scales, and of the KV cache's.
OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale")
OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens a compressed-tensors checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    form = config.read(str, "format", default="dense")
    if form not in (*FORMS, *MIXED):
        raise config.unsupported(f"format = {form!r}", f"Implemented are {', '.join(FORMS)}.")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        settings = config.read(dict, key, default={})
        if settings and settings.get("format") != "dense":
            raise config.unsupported(f"{key} = {settings}"[:200])
    cache = bool(config.read(dict, "kv_cache_scheme", default={}))
    schemes = read_schemes(config, form, (*FORMS, *MIXED))
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return CompressedTensors(tensors, schemes, cache)


class CompressedTensors(QuantizedFormat):
    """Reader of compressed-tensors weights; `cache`: scales of a KV cache exist, and are not used."""

    def __init__(self, tensors: Tensors, schemes: Schemes, cache: bool) -> None:
        super().__init__(tensors)
        self._schemes, self._cache = schemes, cache

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns a quantized weight; None if it is stored as in other checkpoints.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        plain, packed = self.tensors.find(name), self.tensors.find(f"{name}_packed")
        if packed is None and (plain is None or plain.dtype not in (torch.int8, torch.float8_e4m3fn)):
            return None
        scheme = self._schemes.of(name.removesuffix(".weight"))
        if scheme is None:
            raise EngineError(f"{name} cannot be used", "it is quantized, and no group of config_groups has it")
        activations = scheme.activations
        if activations is not None and not (activations.dynamic and activations.symmetric):
            self.note_static_activations()
        match scheme.form, scheme.weights.kind:
            case "pack-quantized", "int":
                return self._packed_integers(name, shape, scheme)
            case "int-quantized" | "naive-quantized", "int":
                return self._integers(name, shape, scheme)
            case "float-quantized" | "naive-quantized" | "mxfp8-quantized", "float":
                read = "fp8" if activations is not None and activations.is_fp8 else "bf16"
                return fp8_weight(self, name, shape, f"{name}_scale", scheme.weights.block, read)
            case "mxfp4-pack-quantized", "float":
                return mxfp4_weight(self, name, shape, f"{name}_packed", f"{name}_scale")
            case "nvfp4-pack-quantized", "float":
                return nvfp4_weight(self, name, shape, f"{name}_packed", f"{name}_global_scale", torch.div)
        raise UnsupportedModelError(f"{name} is stored as {scheme.form} of type {scheme.weights.kind}")

    def means_nothing(self, name: str) -> bool:
        """Checks if a tensor is a scale of activations or of the KV cache, or zero points that are all 0."""
        info = self.tensors.find(name)
        if info is not None and name.endswith(".weight_zero_point"):  # of a symmetric weight
            zeros = self.tensors.take(name, info.shape, dtypes=[info.dtype])()
            return not zeros.reshape(-1).view(torch.uint8).any()
        return name.endswith(OF_ACTIVATIONS) or (self._cache and name.endswith(OF_CACHE))

    def _integers(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> RowsTensor:
        """Reads integers that are stored as INT8, whatever their number of bits."""
        values = by_rows(self.tensors.take(name, shape, dtypes=[torch.int8]))
        return self._fit(name, shape, scheme, from_signed(values, scheme.weights.bits))

    def _packed_integers(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> RowsTensor:
        (rows, columns), bits = shape, scheme.weights.bits
        words = self.tensors.take(f"{name}_packed", (rows, words_for(columns, bits)), dtypes=[torch.int32])
        if self.tensors.find(f"{name}_shape") is not None:
            self.tensors.take(f"{name}_shape", (2,), dtypes=[torch.int64, torch.int32])  # repeats `shape`

        def codes() -> RowReader:
            values = words()
            return lambda begin, end: unpack(values[begin:end], bits, columns)

        return self._fit(name, shape, scheme, codes)

    def _fit(self, name: str, shape: tuple[int, ...], scheme: Scheme, codes: Open) -> RowsTensor:
        """Fits integers; `codes` are UINT8, the stored numbers plus half of the codes."""
        weights, activations = scheme.weights, scheme.activations
        scales = take_scales(self.tensors, f"{name}_scale", shape, weights.block)
        zeros = None if weights.symmetric else self._zeros(f"{name}_zero_point", shape, weights)
        numbers = Groups(scales.size, scales.scales, zeros)
        int8_group = activations.int8_group if activations else None
        return integers_by_g_idx(self, name, shape, weights.bits, codes, numbers, f"{name}_g_idx", int8_group)

    def _zeros(self, name: str, shape: tuple[int, ...], weights: QuantizationArgs) -> Open:
        """Reads zero points that are packed along the weight's rows, or INT8."""
        info, bits, rows = self.tensors.find(name), weights.bits, shape[0]
        if info is None or info.dtype != torch.int32:
            offset = 1 << bits - 1
            return take_grid(self.tensors, name, shape, weights.block, [torch.int8], lambda zeros: zeros.int() + offset)
        groups = -(-shape[1] // (weights.block[1] if weights.block else shape[1]))
        packed = self.tensors.take(name, (words_for(rows, bits), groups), dtypes=[torch.int32])
        return by_columns(packed, lambda words: unpack(words.t(), bits, rows))
