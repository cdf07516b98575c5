"""A checkpoint folder in the form of the hub: config.json, tokenizer.json, weights in safetensors files."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from enginewright.builder.checkpoint.base import TensorInfo, TokenizerFiles
from enginewright.builder.checkpoint.files import INDEX_LIMIT_BYTES, SourceFolder, check_pulled, first_line, hub_origin
from enginewright.builder.checkpoint.folder_tokenizer import TOKENIZER_FILES, check_tokenizer, read_tokenizer
from enginewright.builder.checkpoint.sentence_transformers import dense_weights, module_texts, read_pooling
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from enginewright.manifest import EAGLE, MEDUSA

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # modelopt's file, for a config.json without quantization_config
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Name of a dtype in a safetensors header → dtype.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFolder:
    """The tensors of a folder: headers are read when it is created, tensors one at a time, each time from the file."""

    def __init__(self, files: SourceFolder, name: str | None = None, more: Mapping[str, str] = MappingProxyType({})):
        """Reads the headers.

        Args:
            files: the folder.
            name: as in `Checkpoint.name`; None is the folder's name.
            more: safetensors files other than the model's own: name → prefix of the names in it.

        Raises:
            EngineError: a file cannot be used; the message names it. Pickled weights are refused.
        """
        self.name, self.origin = name or files.path.resolve().name, hub_origin(files.path)
        self._files, self._prefixes = files, more
        self._shard_of: dict[str, str] = {}
        self.tensors: Mapping[str, TensorInfo] = self._read_headers()

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor from its file."""
        # The file is opened again each time: the header is checked against the file's length again, and the mapping of
        # one tensor is freed with it.
        shard = self._shard_of[name]
        try:
            with safe_open(self._files.file(shard), framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name.removeprefix(self._prefixes.get(shard, "")))
        except (SafetensorError, OSError) as error:
            raise _unreadable(shard, self._files.path, error) from error
        if TensorInfo(tensor.dtype, tuple(tensor.shape)) != self.tensors[name]:
            raise EngineError(f"{shard} in {self._files.path} changed while it was read", f"tensor {name}")
        return tensor

    def source_hashes(self) -> Mapping[str, str]:
        """Returns file name → SHA-256 of every file that the engine depends on."""
        return self._source_hashes

    def _texts(self) -> Sequence[str]:
        """Names of files other than those of tensors that the engine depends on; some may not exist."""
        return [CONFIG, INDEX]

    @cached_property
    def _source_hashes(self) -> Mapping[str, str]:
        present = {name for name in self._texts() if self._files.find(name)} | set(self._shard_of.values())
        return {name: self._files.sha256(name) for name in sorted(present)}

    def _read_headers(self) -> dict[str, TensorInfo]:
        """Reads every tensor's dtype and shape, and its file into `_shard_of`; no tensor is read."""
        shards, index = weight_files(self._files)
        shards = [*shards, *self._prefixes]
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            for name, info in _read_header(self._files, shard).items():
                name = self._prefixes.get(shard, "") + name
                if name in tensors:
                    raise EngineError(
                        f"tensor {name} is in two files of {self._files.path}", f"{self._shard_of[name]} and {shard}"
                    )
                tensors[name] = info
                self._shard_of[name] = shard
        for name, shard in index.items():
            if self._shard_of.get(name) != shard:
                raise EngineError(
                    f"{shard} in {self._files.path} holds no tensor {name}",
                    f"{INDEX} says that it does",
                    "Download the checkpoint again, all of it.",
                )
        return tensors


class FolderCheckpoint(TensorFolder):
    """A whole checkpoint: config, tokenizer and tensors.

    No code of the folder is ever run: `auto_map` and the Python files that it names are ignored, and pickled weights
    are refused.
    """

    def __init__(self, path: Path, name: str | None = None, root: Path | None = None) -> None:
        """Reads the config and the headers.

        Args:
            path: the folder.
            name: as in `Checkpoint.name`; None is the folder's name.
            root: as in `SourceFolder`.

        Raises:
            EngineError: a file cannot be used; the message names it.
        """
        files = SourceFolder(path, root)
        self.config: Mapping[str, Any] = read_config(files)
        self.generation_config: Mapping[str, Any] = files.read_json(GENERATION_CONFIG)
        check_tokenizer(files)
        self.pooling = read_pooling(files)
        # Tensors of a layer after the pooling have the prefix `2_Dense.`.
        super().__init__(files, name, {shard: f"{shard.rpartition('/')[0]}." for shard in dense_weights(files)})

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer."""
        return read_tokenizer(self._files)

    def _texts(self) -> Sequence[str]:
        own = [CONFIG, GENERATION_CONFIG, MODELOPT_CONFIG, *TOKENIZER_FILES, INDEX]
        return [*own, *module_texts(self._files)]


def read_config(files: SourceFolder) -> dict[str, Any]:
    """Reads config.json, and adds the quantization_config that modelopt writes into a file of its own.

    Raises:
        UsageError: there is no config.json, or it belongs to a head (head.py).
        UnsupportedModelError: it has no model_type.
    """
    folder = files.path
    if files.find(CONFIG) is None:
        raise UsageError(
            f"{folder} is not a checkpoint",
            f"it holds no {CONFIG}",
            "Name a folder with config.json, tokenizer.json and safetensors files, a GGUF file, or a hub id.",
        )
    config = files.read_json(CONFIG)
    if (role := head_role(config)) is not None:
        raise UsageError(
            f"{folder} holds no model",
            f"by its {CONFIG}, it is a head that proposes draft tokens for one: {role}",
            "Name its model, and its folder with --draft. From the hub, download it first: "
            "`hf download OWNER/NAME --local-dir FOLDER`.",
        )
    if not isinstance(config.get("model_type"), str):
        raise UnsupportedModelError(f"{CONFIG} in {folder} names no model_type")
    modelopt = files.read_json(MODELOPT_CONFIG).get("quantization")
    if config.get("quantization_config") is None and isinstance(modelopt, dict):
        config["quantization_config"] = {"quant_method": "modelopt", **modelopt}
    return config


def head_role(config: Mapping[str, Any]) -> str | None:
    """Returns the role of the head that a config.json belongs to, by its class or keys; None for a model.

    Raises:
        UnsupportedModelError: it has signs of several kinds of heads.
    """
    architectures = config.get("architectures")
    classes = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    keys = config.keys()
    signs = {
        EAGLE: "Eagle" in classes or bool(keys & {"draft_vocab_size", "speculators_model_type"}),
        MEDUSA: "Medusa" in classes or "medusa_num_heads" in keys or config.get("model_type") == "medusa",
    }
    roles = [role for role, present in signs.items() if present]
    if len(roles) > 1:
        raise UnsupportedModelError(f"{CONFIG} has signs of several kinds of heads", " and ".join(roles))
    return roles[0] if roles else None


def weight_files(files: SourceFolder) -> tuple[list[str], dict[str, str]]:
    """Lists the safetensors files, and for each tensor that an index lists its file.

    Raises:
        UnsupportedModelError: the weights are pickles.
        EngineError: there are none, or a file that the index names does not exist.
    """
    if files.find(WEIGHTS):
        return [WEIGHTS], {}
    if files.find(INDEX):
        index = read_index(files)
        shards = sorted(set(index.values()))
        for shard in shards:
            files.file(shard)
        return shards, index
    found = sorted(path.name for path in files.path.iterdir() if path.suffix == ".safetensors")
    if len(found) == 1:
        return found, {}
    if found:
        raise EngineError(
            f"{files.path} holds {len(found)} safetensors files and no {INDEX}",
            "only the index says which of them belong to the model",
            "Download the checkpoint again, all of it.",
        )
    if pickles := sorted(path.name for path in files.path.iterdir() if path.suffix in PICKLE_SUFFIXES):
        raise refuse_pickle(pickles[0], files.path)
    raise EngineError(f"{files.path} holds no weights", f"neither {WEIGHTS}, {INDEX} nor a GGUF file")


def read_index(files: SourceFolder) -> dict[str, str]:
    """Reads tensor name → file name from the index of a sharded checkpoint."""
    weight_map = files.read_json(INDEX, INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise EngineError(f"{INDEX} in {files.path} has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise EngineError(f"{INDEX} in {files.path} names no safetensors file", f"{shard!r} for tensor {tensor}")
    return weight_map


def refuse_pickle(name: str, folder: Path) -> UnsupportedModelError:
    """Makes the error for pickled weights.

    Args:
        name: name of the file.
        folder: its folder.
    """
    return UnsupportedModelError(
        f"{name} in {folder} is a pickle",
        "reading one can run any code that its author put in",
        "Look for the same model as safetensors. If you trust the file, convert it in a sandbox: load a model with "
        "transformers and call save_pretrained, or a head with torch and call safetensors.torch.save_file.",
    )


def _read_header(files: SourceFolder, shard: str) -> dict[str, TensorInfo]:
    path = files.file(shard)
    check_pulled(shard, path)
    infos = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (the file is not a mapping)
                part = file.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise UnsupportedModelError(f"tensor {name} in {shard} has dtype {part.get_dtype()}")
                infos[name] = TensorInfo(dtype, tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise _unreadable(shard, files.path, error) from error
    return infos


def _unreadable(shard: str, folder: Path, error: Exception) -> EngineError:
    return EngineError(
        f"{shard} in {folder} is cut short or is not a safetensors file", first_line(error), "Download that file again."
    )
