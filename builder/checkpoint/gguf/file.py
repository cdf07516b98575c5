"""A GGUF file as a checkpoint, which reverses the changes of llama.cpp's converter."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from enginewright.builder.checkpoint.base import TensorInfo, TokenizerFiles
from enginewright.builder.checkpoint.files import SourceFolder, hub_origin, sha256
from enginewright.builder.checkpoint.gguf.config import synthesize
from enginewright.builder.checkpoint.gguf.families import find_family
from enginewright.builder.checkpoint.gguf.header import GgufTensor, read_header
from enginewright.builder.checkpoint.gguf.tensors import ROPE_FACTORS, map_tensors
from enginewright.builder.checkpoint.gguf.tokenizer import Vocabulary, build_tokenizer, generation_config
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.regular_file import open_regular

PIECE_ELEMENTS = 1 << 18  # elements that are dequantized at a time; the arithmetic needs several times their memory
QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|TQ\d\w*|MXFP4|F16|F32|BF16)$", re.IGNORECASE)


class GgufCheckpoint:
    """A checkpoint in a GGUF file: the header is read when it is created, tensors one at a time, as float32."""

    def __init__(self, path: Path, name: str | None = None, folder_root: Path | None = None) -> None:
        """Reads the header.

        Args:
            path: the file.
            name: as in `Checkpoint.name`; None is the file's name without its quantization.
            folder_root: as in `SourceFolder`, for a file in a checkpoint's folder.

        Raises:
            UnsupportedModelError: an architecture, a tensor type or a feature is not implemented; the message names it.
            EngineError: the file is damaged.
        """
        self._path = SourceFolder(path.parent, folder_root).file(path.name) if folder_root else path
        self._file_name = path.name
        self.name, self.origin = name or QUANT_SUFFIX.sub("", path.stem), hub_origin(path.parent)
        header = read_header(self._path)
        _refuse_split(header.metadata, path.name)
        family = find_family(header)
        factors = header.tensors.get(ROPE_FACTORS)
        if factors:
            check_type(factors)
        config = synthesize(header, family, self._dequantized(factors) if factors else None)
        self._vocabulary = Vocabulary(header.metadata, config["vocab_size"])
        self._sources = map_tensors(header, family, config)
        for tensor in {part.type: part for source in self._sources.values() for part in source.parts}.values():
            check_type(tensor)
        self.pooling = None  # llama.cpp's embedding models are not supported
        self.generation_config: Mapping[str, Any] = generation_config(self._vocabulary)
        self.config: Mapping[str, Any] = config
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(torch.float32, source.shape) for name, source in self._sources.items()
        }

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer."""
        return build_tokenizer(self._vocabulary)

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor."""
        source = self._sources[name]
        return source.restore(*(self._dequantized(part) for part in source.parts))

    def source_hashes(self) -> Mapping[str, str]:
        """Returns the file's name → SHA-256."""
        return self._source_hashes

    @cached_property
    def _source_hashes(self) -> Mapping[str, str]:
        return {self._file_name: sha256(self._path)}

    def _dequantized(self, tensor: GgufTensor) -> torch.Tensor:
        return read_tensor(self._path, tensor)


def read_tensor(path: Path, tensor: GgufTensor) -> torch.Tensor:
    """Reads a tensor with `pread`, not a mapping: a file that became shorter is then an error, and not a signal.

    Args:
        path: the file.
        tensor: the tensor's position and form in it.

    Returns:
        The dequantized numbers, FLOAT.

    Raises:
        EngineError: the file cannot be read.
    """
    values = torch.empty(tensor.shape, dtype=torch.float32)
    rows = values.view(-1, tensor.shape[-1]).numpy()
    row_bytes = tensor.nbytes // len(rows)
    step = max(1, PIECE_ELEMENTS // tensor.shape[-1])
    try:
        with open(open_regular(path), "rb", buffering=0) as file, np.errstate(all="ignore"):
            file.seek(tensor.offset_bytes)
            for start in range(0, len(rows), step):
                piece = rows[start : start + step]
                raw = np.fromfile(file, np.uint8, len(piece) * row_bytes)
                if raw.size != len(piece) * row_bytes:
                    raise EngineError(f"{path.name} became shorter while it was read")
                # As one row, since the package goes through rows in groups of 16.
                piece[:] = gguf.dequantize(raw.reshape(1, -1), tensor.type).reshape(piece.shape)
    except OSError as error:
        raise EngineError(f"{path.name} cannot be read", error.strerror or str(error)) from error
    return values


def check_type(tensor: GgufTensor) -> None:
    """Checks that the `gguf` package can dequantize a tensor.

    Raises:
        UnsupportedModelError: it cannot.
    """
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"tensor {tensor.name} has unknown type {tensor.type.name}") from error


def _refuse_split(metadata: Mapping[str, Any], name: str) -> None:
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{name} is one of {count} files of a model", fix="Merge them: llama-gguf-split --merge FIRST MERGED."
        )
