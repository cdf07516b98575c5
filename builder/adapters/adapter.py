"""A LoRA adapter: its choices, and the updates of single modules, from PEFT's folder or a GGUF file."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from enginewright.builder.adapters.experts import ExpertsPart
from enginewright.builder.adapters.gguf import PREFIX, SUFFIX, GgufAdapterFile
from enginewright.builder.adapters.names import BaseNames
from enginewright.builder.adapters.peft_config import ADAPTER_CONFIG, NOT_OF_EXPERTS, PeftConfig, read_peft_config
from enginewright.builder.checkpoint.base import TensorSource
from enginewright.builder.checkpoint.files import SourceFolder, cached_repository
from enginewright.builder.checkpoint.folder import TensorFolder
from enginewright.builder.checkpoint.hub import download_adapter, parse_hub_id
from enginewright.builder.tensors import Tensors, short
from enginewright.checkpoint_ref import PATH_PREFIXES
from enginewright.errors import EngineError, UnsupportedModelError, UsageError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXPERTS, WRAPPED = ".experts", ".base_layer"  # ends of names of modules
MAX_RANK = 4096  # far above any known adapter

# End of a tensor's name → field of ModuleUpdate. What follows none of them replaces a tensor of the model.
PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "b_bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "token_rows",
    ".base_layer.weight": "weight",
    ".base_layer.bias": "bias",
    ".modules_to_save.weight": "weight",
    ".modules_to_save.bias": "bias",
    ".weight": "weight",
    ".bias": "bias",
}


@dataclass
class ModuleUpdate:
    """The changes of one module: names of the adapter's tensors, by what they are. Shapes are those in the file."""

    module: str  # name of the module, such as model.layers.0.self_attn.q_proj
    parts: dict[str, str] = field(default_factory=dict)  # value of PARTS → name of the tensor

    @property
    def experts_module(self) -> str | None:
        """Name of the module with the experts whose matrices have these factors; None if they are of one layer.

        PEFT wraps a module once for each of its parameters.
        """
        name = self.module
        while name.endswith(WRAPPED):
            name = name.removesuffix(WRAPPED)
        return name if "a" in self.parts and name.endswith(EXPERTS) else None

    @property
    def changes_weight(self) -> bool:
        """True if the module's weight differs from the model's."""
        return bool(self.parts.keys() - {"bias", "b_bias"})

    @property
    def changes_bias(self) -> bool:
        """True if the module's bias differs from the model's."""
        return bool(self.parts.keys() & {"bias", "b_bias"})

    @property
    def is_linear_in_scale(self) -> bool:
        """True if the changes can be weighted: they are added to the model's numbers, and replace none."""
        return not self.parts.keys() & {"magnitude", "token_rows", "weight", "bias"}


class AdapterSource(TensorSource, Protocol):
    """The files of an adapter, which have its tensors under PEFT's names."""

    @property
    def name(self) -> str:
        """Name of the adapter."""

    @property
    def config(self) -> PeftConfig:
        """Choices of the adapter."""

    def source_hashes(self) -> Mapping[str, str]:
        """Returns file name → SHA-256 of every file that an engine depends on."""


class PeftFolder(TensorFolder):
    """A folder that PEFT has saved: adapter_config.json and a safetensors file.

    Args:
        path: the folder.
        root: as in `SourceFolder`.

    Attributes:
        config: the choices of the adapter.

    Raises:
        UsageError: there is no such folder, or it holds no adapter.
        UnsupportedModelError: the adapter is of another kind, has a feature that is not implemented, or is a pickle.
        EngineError: a file is damaged.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        if not path.is_dir():
            fix = "Name the folder with adapter_config.json, a GGUF file, or OWNER/NAME on the Hugging Face hub."
            raise UsageError(f"there is no adapter {path}", "no such folder or file", fix)
        files = SourceFolder(path, root or cached_repository(path))
        if files.find(ADAPTER_CONFIG) is None:
            raise UsageError(f"{path} is not an adapter", f"it holds no {ADAPTER_CONFIG}")
        self.config: PeftConfig = read_peft_config(files.read_json(ADAPTER_CONFIG))
        super().__init__(files)

    def _texts(self) -> Sequence[str]:
        return [ADAPTER_CONFIG]


class Adapter:
    """A LoRA adapter. Headers of files are read when it is opened, tensors when they are needed.

    Args:
        path: the folder that PEFT has saved, or a GGUF file.
        weight: factor on all that the adapter adds.
        name: its name; None is the folder's or the file's.
        root: as in `SourceFolder`.
        base: numbers of attention heads of the base model, as in `GgufAdapterFile`.

    Attributes:
        name: its name.
        config: its choices.
        updates: name of a module → its changes.
        weight: as given.

    Raises:
        UsageError: there is no such folder or file, or it holds no adapter.
        UnsupportedModelError: the adapter is of another kind, has a feature that is not implemented, or is a pickle.
        EngineError: a file is damaged, or tensors do not fit the config.
    """

    def __init__(
        self,
        path: Path,
        weight: float = 1.0,
        name: str | None = None,
        root: Path | None = None,
        base: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        is_gguf = path.suffix.lower() == SUFFIX and path.exists() and not path.is_dir()
        self._source: AdapterSource = GgufAdapterFile(path, base) if is_gguf else PeftFolder(path, root)
        self.name, self.weight = name or self._source.name, weight
        self.config = self._source.config
        self._tensors = Tensors(self._source)
        self.updates: Mapping[str, ModuleUpdate] = self._read_updates()
        for update in self.updates.values():
            self._check(update)

    @classmethod
    def open(
        cls,
        ref: str,
        weight: float = 1.0,
        name: str | None = None,
        base: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Adapter":
        """Opens a folder, a GGUF file, or an adapter of the Hugging Face hub, which is downloaded if it is not cached.

        Args:
            ref: the folder or file, or a hub id.
            weight: as in the constructor.
            name: its name; None is the folder's or file's, or that on the hub.
            base: as in the constructor.

        Raises:
            UsageError: there is no such folder, file or repository, or it holds no adapter.
            UnsupportedModelError: as in the constructor.
            EngineError: as in the constructor, or the hub cannot be reached.
        """
        path = Path(ref).expanduser()
        is_path = path.exists() or ref.startswith(PATH_PREFIXES) or path.suffix.lower() == SUFFIX
        hub_id = None if is_path else parse_hub_id(ref)
        if hub_id is None:
            return cls(path, weight, name, base=base)
        snapshot = download_adapter(hub_id)
        return cls(snapshot.path, weight, name or hub_id.name, snapshot.root)

    def named_as(self, base: BaseNames) -> "Adapter":
        """Names the modules of the adapter as a base does, in a copy of it.

        Args:
            base: the names of the base.

        Raises:
            EngineError: two of its modules are one of the base.
        """
        named, names = copy.copy(self), dict[str, str]()
        updates: dict[str, ModuleUpdate] = {}
        for own, update in self.updates.items():
            module, wraps = own, ""
            while module.endswith(WRAPPED):
                module, wraps = module.removesuffix(WRAPPED), wraps + WRAPPED
            name = base.find(module)
            if name + wraps in updates:
                raise self.error(f"{own} and another of its modules are {name} of the base")
            updates[name + wraps] = ModuleUpdate(name + wraps, update.parts)
            if name != module:
                names |= {name: module, name + wraps: own}
        named.updates, named.config = updates, replace(self.config, names=names)
        return named

    @property
    def source_hashes(self) -> Mapping[str, str]:
        """File name → SHA-256 of every file that the engine depends on."""
        return self._source.source_hashes()

    def shape(self, update: ModuleUpdate, part: str) -> tuple[int, ...]:
        """Shape of a tensor of an update, as it is stored.

        Args:
            update: the update.
            part: one of its parts.
        """
        return self._source.tensors[update.parts[part]].shape

    def read(self, update: ModuleUpdate, part: str) -> torch.Tensor:
        """Reads a tensor of an update.

        Args:
            update: the update.
            part: one of its parts.

        Returns:
            The numbers in fp32, as they are stored.

        Raises:
            EngineError: a number is not finite.
        """
        name = update.parts[part]
        values = self._tensors.take(name, self.shape(update, part), dtypes=DTYPES)().float()
        if not bool(torch.isfinite(values).all()):
            raise EngineError(f"tensor {name} of the adapter {self.name} has numbers that are not finite")
        return values

    def product(self, update: ModuleUpdate, part: ExpertsPart | None = None) -> torch.Tensor | None:
        """Computes what an update adds to a module's weight, without `weight`.

        Args:
            update: the update.
            part: the tensor of experts that it is computed for.

        Returns:
            scale · B · A in fp32, [out, in], and of an embedding [tokens, columns]; None if it has no such factors.
        """
        scale = self.config.scale_of(update.module if part is None else part.parameter)
        if part is not None:
            return scale * part.of(self.read(update, "a"), self.read(update, "b"))
        if "a" in update.parts:
            return scale * (self.read(update, "b") @ self.read(update, "a"))
        if "embedding_a" in update.parts:
            return scale * (self.read(update, "embedding_b") @ self.read(update, "embedding_a")).t()
        return None

    def error(self, why: str) -> EngineError:
        """Makes the error for an adapter whose tensors do not fit."""
        return EngineError(f"the adapter {self.name} cannot be used", why)

    def _read_updates(self) -> dict[str, ModuleUpdate]:
        updates: dict[str, ModuleUpdate] = {}
        for name, info in self._source.tensors.items():
            end = next((end for end in PARTS if name.endswith(end)), None)
            if end is None or not name.startswith(PREFIX) or "lora_" in name.removesuffix(end):
                raise UnsupportedModelError(
                    f"tensor {name} of the adapter {self.name} is not known",
                    "an adapter that is used without a part of it computes something else",
                    "Merge the adapter with PEFT, and build the merged model.",
                )
            if info.dtype not in DTYPES:
                raise UnsupportedModelError(f"tensor {name} of the adapter {self.name} is {short(info.dtype)}")
            module = name.removeprefix(PREFIX).removesuffix(end)
            parts = updates.setdefault(module, ModuleUpdate(module)).parts
            if PARTS[end] in parts:
                raise self.error(f"{parts[PARTS[end]]} and {name} are the same part of {module}")
            parts[PARTS[end]] = name
        if not updates:
            raise self.error("its file has no tensors")
        return updates

    def _check(self, update: ModuleUpdate) -> None:
        """Checks that the parts of an update belong together, and to the config."""
        parts = update.parts
        for a, b, is_embedding in ("a", "b", False), ("embedding_a", "embedding_b", True):
            if (a in parts) != (b in parts):
                raise self.error(f"{update.module} has only one of its two factors: {next(iter(parts.values()))}")
            if a in parts:
                self._check_factors(update, self.shape(update, a), self.shape(update, b))
            if a in parts and is_embedding and "magnitude" in parts:
                raise UnsupportedModelError(
                    f"{update.module} of the adapter {self.name} is an embedding with DoRA",
                    fix="Merge the adapter with PEFT, and build the merged model.",
                )
        if update.experts_module is not None and (others := parts.keys() - {"a", "b"}):
            what = f"tensor {parts[min(others)]} of the adapter {self.name} is of experts"
            raise UnsupportedModelError(what, NOT_OF_EXPERTS, "Train it without use_dora and lora_bias.")
        if ("magnitude" in parts) != (self.config.use_dora and "a" in parts):
            raise self.error(f"use_dora is {self.config.use_dora}, which does not fit the tensors of {update.module}")
        if "b_bias" in parts and "b" not in parts:
            raise self.error(f"{update.module} has a bias of a factor that it does not have")
        if "token_rows" in parts:
            ids = self.config.tokens_of(update.module)
            shape = self.shape(update, "token_rows")
            if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
                raise self.error(f"trainable_token_indices of {update.module} has a token twice, or one below 0")
            if len(shape) != 2 or shape[0] != len(ids):
                raise self.error(f"{update.module} has rows of shape {list(shape)} for {len(ids)} tokens")

    def _check_factors(self, update: ModuleUpdate, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
        """Checks the shapes of two factors; those of experts depend on their number, and are checked later."""
        what = f"{update.module} has factors of shape {list(shape_a)} and {list(shape_b)}"
        if len(shape_a) != 2 or len(shape_b) != 2:
            raise UnsupportedModelError(f"the adapter {self.name} is not of linear layers", what)
        if update.experts_module is not None:
            if not self.config.adapts_experts:
                raise self.error(f"{what}, and target_parameters in {ADAPTER_CONFIG} does not name it")
            return
        rank = self.config.rank_of(update.module)
        if not shape_a[0] == shape_b[1] == rank <= MAX_RANK:
            raise self.error(f"{what}, but rank {rank} in {ADAPTER_CONFIG}")
