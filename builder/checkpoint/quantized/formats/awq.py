"""AWQ checkpoints of AutoAWQ (version "gemm"): integers of 4 bits with zero points, in groups of columns.

Tensors of a layer [N, K]: `qweight` INT32 [K, N / 8] and `qzeros` INT32 [G, N / 8], eight rows of the weight in a word;
`scales` [G, N]. A code represents (code - zero) · scale. https://arxiv.org/abs/2306.00978; the layout is that of
AutoAWQ's modules/linear/gemm.py.
"""

import torch

from enginewright.builder.checkpoint.quantized.bits import unpack
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, by_columns, integers
from enginewright.builder.checkpoint.quantized.format import FLOATS, QuantizedFormat
from enginewright.builder.checkpoint.quantized.formats.gptq import HARMLESS as OF_GPTQ
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Read, Tensors
from enginewright.errors import EngineError
from enginewright.passes.weights import RowReader, RowsTensor

BITS = 4
IN_WORD = 8
NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of a word with its first row, its second, …
# Keys of other programs' kernels, and GPTQ's keys, which transformers and GPTQModel write as well.
HARMLESS = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym", *OF_GPTQ)


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens an AWQ checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    bits = config.read(int, "bits", "w_bit")
    if bits != BITS:
        raise config.unsupported(f"bits = {bits}", f"Implemented is {BITS}.")
    group = config.read(int, "group_size", "q_group_size")
    if group < 1 and group != -1:
        raise config.error(f"group_size is {group}, neither above 0 nor -1")
    version = config.read(str, "version", "format", "checkpoint_format", default="gemm").lower()
    if version != "gemm":
        raise config.unsupported(f"version = {version!r}", "Implemented is gemm.")
    config.read(bool, "zero_point", default=True)  # zero points always exist
    if config.read(bool, "desc_act", default=False):
        raise config.unsupported("desc_act = True")
    if (words := config.read(str, "pack_dtype", default="int32")) != "int32":
        raise config.unsupported(f"pack_dtype = {words!r}")
    if config.holds("backend", "llm-awq"):
        raise config.unsupported("backend = 'llm-awq'")
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return Awq(tensors, group)


class Awq(QuantizedFormat):
    """Reader of AWQ weights."""

    def __init__(self, tensors: Tensors, group: int) -> None:
        super().__init__(tensors)
        self._group = group

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns a weight of integers; None if it is not quantized.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        module = name.removesuffix(".weight")
        if self.tensors.find(f"{module}.qweight") is None:
            return None
        rows, columns = shape
        size = self._group if self._group > 0 else columns
        if rows % IN_WORD or columns % size:
            raise EngineError(f"{name} cannot be used", f"{list(shape)} is not whole words and groups of {size}")
        groups, words = columns // size, rows // IN_WORD
        packed = self.tensors.take(f"{module}.qweight", (columns, words), dtypes=[torch.int32])
        zeros = self.tensors.take(f"{module}.qzeros", (groups, words), dtypes=[torch.int32])
        scales = self.tensors.take(f"{module}.scales", (groups, rows), dtypes=FLOATS)
        numbers = Groups(size, by_columns(scales), by_columns(zeros, _unpacked))
        return integers(self, name, shape, BITS, _codes(packed), numbers)


def _codes(words: Read) -> Open:
    def open() -> RowReader:
        values = words()

        def rows(begin: int, end: int) -> torch.Tensor:
            first = begin // IN_WORD
            codes = _unpacked(values[:, first : -(-end // IN_WORD)])
            return codes[:, begin - first * IN_WORD : end - first * IN_WORD].t()

        return rows

    return open


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpacks codes UINT8 [..., 8 n] from words [..., n]."""
    codes = unpack(words, BITS, words.shape[-1] * IN_WORD)
    return codes.view(*words.shape, IN_WORD)[..., NIBBLES].flatten(-2)
