"""MXFP4 checkpoints, such as gpt-oss: FP4 numbers, and a power of two for each 32 of them.

Tensors of a parameter [..., K]: `<name>_blocks` UINT8 [..., K / 32, 16], two numbers a byte, and `<name>_scales` UINT8
[..., K / 32]. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.builder.checkpoint.quantized.fours import mxfp4_experts, mxfp4_weight
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors
from enginewright.passes.weights import RowsTensor

HARMLESS = ("dequantize", "modules_to_not_convert")


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens an MXFP4 checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return Mxfp4Format(tensors)


class Mxfp4Format(QuantizedFormat):
    """Reader of MXFP4 weights."""

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns an MXFP4 weight; None if it is not quantized.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        if self.tensors.find(f"{name}_blocks") is None:
            return None
        return mxfp4_weight(self, name, shape, f"{name}_blocks", f"{name}_scales")

    def experts(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns the MXFP4 weights of all experts; None if they are not quantized.

        Args:
            name: name of the tensor.
            shape: [experts, N, K].
        """
        if self.tensors.find(f"{name}_blocks") is None:
            return None
        return mxfp4_experts(self, name, shape, f"{name}_blocks", f"{name}_scales")
