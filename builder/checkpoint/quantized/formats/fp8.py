"""FP8 checkpoints with a `quant_method` of that name: DeepSeek's blocks, and one scale per weight or per row.

Tensors of a layer [N, K]: `weight` FLOAT8E4M3FN, and `weight_scale_inv` (or `weight_scale`), its factor: for each block
of rows and columns, for each row, or one for all. https://arxiv.org/abs/2412.19437, 3.3.2; names and settings are those
of transformers' FineGrainedFP8Config.
"""

import torch

from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.builder.checkpoint.quantized.grids import Block, fp8_weight
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.passes.weights import RowsTensor

SCHEMES = ("dynamic", "static")
HARMLESS = ("dequantize", "ignored_layers", "modules_to_not_convert", "kv_cache_scheme")
OF_ACTIVATIONS = ("activation_scale", "input_scale")
OF_CACHE = ("k_scale", "v_scale")


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens an FP8 checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    scheme = config.read(str, "activation_scheme", default="dynamic").lower()
    if scheme not in SCHEMES:
        raise config.unsupported(f"activation_scheme = {scheme!r}", f"Implemented are {', '.join(SCHEMES)}.")
    if (numbers := config.read(str, "fmt", default="e4m3")) != "e4m3":
        raise config.unsupported(f"fmt = {numbers!r}", "Implemented is e4m3.")
    if (scales := config.read(str, "scale_fmt", default="float")) not in ("float", "ue8m0"):
        raise config.unsupported(f"scale_fmt = {scales!r}", "Implemented are float, ue8m0.")
    if (experts := config.read(str, "expert_dtype", default="fp8")) != "fp8":
        raise config.unsupported(f"expert_dtype = {experts!r}", "Implemented is fp8.")
    block = config.read_list(int, "weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise config.error(f"weight_block_size is {block}, not two sizes above 0")
    config.read_list(str, "modules_to_convert")  # the tensors themselves show it
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return Fp8Blocks(tensors, (block[0], block[1]) if block else None)


class Fp8Blocks(QuantizedFormat):
    """Reader of FP8 weights."""

    def __init__(self, tensors: Tensors, block: Block | None) -> None:
        super().__init__(tensors)
        self._block = block

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns an FP8 weight; None if it is not quantized.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        info = self.tensors.find(name)
        if info is None or info.dtype != torch.float8_e4m3fn:
            return None
        inverse = f"{name}_scale_inv"
        scales = f"{name}_scale" if self.tensors.find(inverse) is None else inverse
        module = name.removesuffix(".weight")
        if any(self.tensors.find(f"{module}.{suffix}") for suffix in OF_ACTIVATIONS):
            self.note_static_activations()
        return fp8_weight(self, name, shape, scales, self._block, "fp8")

    def means_nothing(self, name: str) -> bool:
        """Checks if a tensor is a scale of activations or of the KV cache."""
        return name.rpartition(".")[2] in (*OF_ACTIVATIONS, *OF_CACHE)
