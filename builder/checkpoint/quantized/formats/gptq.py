"""GPTQ checkpoints of AutoGPTQ and GPTQModel: integers of 2, 3, 4 or 8 bits with zero points, in quantization groups.

Tensors of a layer [N, K]: `qweight` INT32 [K · bits / 32, N], codes packed along K; `qzeros` INT32 [G, N · bits / 32];
`scales` [G, N]; `g_idx` INT32 [K], the group of each column. A code represents (code - zero) · scale. Version 1 stores
zeros less 1. https://arxiv.org/abs/2210.17323; the layout is that of AutoGPTQ's nn_modules/qlinear.
"""

import torch

from enginewright.builder.checkpoint.quantized.bits import unpack, words_for
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, by_columns
from enginewright.builder.checkpoint.quantized.format import FLOATS, QuantizedFormat
from enginewright.builder.checkpoint.quantized.g_idx import integers_by_g_idx
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Read, Tensors
from enginewright.errors import EngineError
from enginewright.passes.weights import RowReader, RowsTensor

BITS = (2, 3, 4, 8)
VERSIONS = {"gptq": 1, "gptq_v2": 2}
# Keys about the search for the weights, or the kernels of other programs.
HARMLESS = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "lm_head", "max_input_length", "meta", "method",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_not_convert", "mse", "pad_token_id", "static_groups", "tokenizer",
    "true_sequential", "use_cuda_fp16", "use_exllama",
)  # fmt: skip


def open(config: ConfigReader, tensors: Tensors) -> QuantizedFormat:
    """Opens a GPTQ checkpoint.

    Args:
        config: its quantization_config.
        tensors: its tensors.
    """
    bits = config.read(int, "bits")
    if bits not in BITS:
        raise config.unsupported(f"bits = {bits}", f"Implemented are {', '.join(map(str, BITS))}.")
    group = config.read(int, "group_size")
    if group < 1 and group != -1:
        raise config.error(f"group_size is {group}, neither above 0 nor -1")
    version = config.read(str, "checkpoint_format", "format", default="gptq")
    if version not in VERSIONS:
        raise config.unsupported(f"checkpoint_format = {version!r}", f"Implemented are {', '.join(VERSIONS)}.")
    if config.read(bool, "is_marlin_format", default=False):
        raise config.unsupported("is_marlin_format = True")
    if (words := config.read(str, "pack_dtype", default="int32")) != "int32":
        raise config.unsupported(f"pack_dtype = {words!r}")
    if config.read(dict, "dynamic", default={}):
        raise config.unsupported("dynamic, settings for single modules")
    symmetric = config.read(bool, "sym", default=True)
    config.read(bool, "desc_act", default=False)  # g_idx itself shows it
    config.refuse_any_unread(("quant_method", *HARMLESS))
    return Gptq(tensors, bits, group, symmetric, VERSIONS[version])


class Gptq(QuantizedFormat):
    """Reader of GPTQ weights."""

    def __init__(self, tensors: Tensors, bits: int, group: int, symmetric: bool, version: int) -> None:
        super().__init__(tensors)
        self._bits, self._group, self._symmetric, self._version = bits, group, symmetric, version

    def weight(self, name: str, shape: tuple[int, ...]) -> RowsTensor | None:
        """Returns a weight of integers; None if it is not quantized.

        Args:
            name: name of the weight.
            shape: [N, K].
        """
        module = name.removesuffix(".weight")
        if self.tensors.find(f"{module}.qweight") is None:
            return None
        (rows, columns), bits = shape, self._bits
        size = self._group if self._group > 0 else columns
        groups = -(-columns // size)
        words = self.tensors.take(f"{module}.qweight", (words_for(columns, bits), rows), dtypes=[torch.int32])
        scales = self.tensors.take(f"{module}.scales", (groups, rows), dtypes=FLOATS)
        packed = self.tensors.take(f"{module}.qzeros", (groups, words_for(rows, bits)), dtypes=[torch.int32])

        def zeros(values: torch.Tensor) -> torch.Tensor:
            if self._version == 2:
                return unpack(values, bits, rows)
            if 32 % bits:
                return unpack(values, bits, rows) + 1 & (1 << bits) - 1
            # Adding to whole words undoes the borrow that a zero of 0 took from its neighbour.
            return unpack(values + sum(1 << bit for bit in range(0, 32, bits)), bits, rows)

        numbers = Groups(size, by_columns(scales), None if self._symmetric else by_columns(packed, zeros))
        codes = _codes(words, bits, columns)
        if self._symmetric:
            codes = _checked(codes, lambda: zeros(packed()), 1 << bits - 1, name)
        return integers_by_g_idx(self, name, shape, bits, codes, numbers, f"{module}.g_idx")

    def means_nothing(self, name: str) -> bool:
        """Checks if a tensor is the bias of zeros that AutoGPTQ adds to layers without one."""
        module = name.removesuffix(".bias")
        info = self.tensors.find(name)
        if module == name or info is None or self.tensors.find(f"{module}.qweight") is None:
            return False
        return not self.tensors.take(name, info.shape, dtypes=FLOATS)().any()


def _codes(words: Read, bits: int, columns: int) -> Open:
    def open() -> RowReader:
        values = words()
        return lambda begin, end: unpack(values[:, begin:end].t(), bits, columns)

    return open


def _checked(codes: Open, zeros: Read, middle: int, name: str) -> Open:
    """Checks that zero points are all the same, as the config says, when codes are read."""

    def open() -> RowReader:
        if (zeros() != middle).any():
            raise EngineError(
                f"{name} cannot be used",
                f"config.json says that it is symmetric, but its zero points are not all {middle}",
                'Set "sym": false in its quantization_config.',
            )
        return codes()

    return open
