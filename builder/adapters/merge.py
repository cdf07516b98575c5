"""A checkpoint with adapters merged into its weights, as if it had been saved so.

A merged weight is W + Σ weight · scale · B · A, in fp32, rounded once where the builder rounds every weight. With DoRA,
its rows are scaled to the adapter's lengths. Source: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2402.09353
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from enginewright.builder.adapters.adapter import Adapter, ModuleUpdate
from enginewright.builder.adapters.experts import ExpertsPart, find_parts
from enginewright.builder.adapters.names import BaseNames
from enginewright.builder.checkpoint.base import Checkpoint, TensorInfo, TokenizerFiles
from enginewright.builder.checkpoint.quantized import format_name
from enginewright.builder.pooling import Pooling
from enginewright.errors import EngineError, UnsupportedModelError, UsageError

HEAD = "lm_head"  # module whose weight is an embedding's where the checkpoint has none
TABLES = ("embed_tokens", "wte", "embeddings")  # last parts of names of embeddings

ADAPTER_PREFIX = "adapter-"  # of the number of an adapter, in names of source files


class Change(NamedTuple):
    """An update of one tensor."""

    adapter: Adapter  # adapter that it is of
    update: ModuleUpdate  # update of the tensor's module
    part: ExpertsPart | None = None  # part of an update of experts; None: it is of one layer


def open_merged(checkpoint: Checkpoint, adapters: Sequence[str]) -> Checkpoint:
    """Merges adapters into a checkpoint.

    Args:
        checkpoint: the checkpoint.
        adapters: folders, files or hub ids of adapters, each with its weight after a colon if that is not 1.

    Returns:
        The merged checkpoint; the given one if there are no adapters.

    Raises:
        UsageError: there is no such adapter, or a weight is not a number, or the adapters cannot be combined.
        UnsupportedModelError: an adapter has a feature that is not implemented, or the checkpoint is quantized.
        EngineError: an adapter does not fit the checkpoint.
    """
    return (
        MergedCheckpoint(checkpoint, [_open(text, checkpoint.config) for text in adapters]) if adapters else checkpoint
    )


def merge_recipe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The part of an engine's recipe about merged adapters; {} for a checkpoint without any."""
    return {"merge": checkpoint.recipe} if isinstance(checkpoint, MergedCheckpoint) else {}


def with_recorded(checkpoint: Checkpoint, recipe: Mapping[str, Any], folders: Sequence[str]) -> Checkpoint:
    """Merges the adapters of an engine's recipe once more.

    Args:
        checkpoint: the checkpoint without adapters.
        recipe: the engine's recipe.
        folders: folders of the adapters, in the order of the recipe.

    Raises:
        UsageError: there are more or fewer folders than adapters.
    """
    recorded = recipe.get("merge", {}).get("adapters", [])
    if len(folders) != len(recorded):
        names = ", ".join(adapter["name"] for adapter in recorded) or "none"
        raise UsageError(f"{len(folders)} adapters are named with --merge", f"the engine has {names}")
    if not recorded:
        return checkpoint
    pairs = zip(folders, recorded, strict=True)
    opened = [Adapter.open(ref, float(one["weight"]), one["name"], checkpoint.config) for ref, one in pairs]
    return MergedCheckpoint(checkpoint, opened)


def _open(text: str, base: Mapping[str, Any]) -> Adapter:
    path, _, weight = text.rpartition(":")
    try:
        factor = float(weight) if path else 1.0
    except ValueError:
        path, factor = "", 1.0
    if not math.isfinite(factor):
        raise UsageError(f"the weight of the adapter {path} is {weight}", "it must be a finite number")
    return Adapter.open(path or text, factor, base=base)


class MergedCheckpoint:
    """A checkpoint with adapters merged into its weights: a Checkpoint.

    Args:
        base: the checkpoint.
        adapters: the adapters.

    Raises:
        UnsupportedModelError: the checkpoint is quantized, or an adapter changes something that it does not have.
        EngineError: shapes do not fit.
        UsageError: the adapters cannot be combined, or weighted.
    """

    def __init__(self, base: Checkpoint, adapters: Sequence[Adapter]) -> None:
        if (format := format_name(base)) is not None:
            raise UnsupportedModelError(
                f"adapters cannot be merged into weights that are quantized already ({format})",
                fix="Merge them into the model that the checkpoint was quantized from, and use --quant.",
            )
        names = BaseNames(base.tensors, is_without_head=base.pooling is not None)
        adapters = [adapter.named_as(names) for adapter in adapters]
        self._base, self._adapters = base, adapters
        self._updates: dict[str, list[Change]] = {}  # name of a tensor → updates that change it
        self._untied: dict[str, str] = {}  # name of a tensor that the base lacks → tensor of the base that it begins as
        for adapter in adapters:
            if adapter.config.invocation_tokens:
                raise UnsupportedModelError(
                    f"the adapter {adapter.name} cannot be merged",
                    "alora_invocation_tokens says that only some tokens have it",
                    "Serve it: prepare it with `engine adapter`.",
                )
            for update in adapter.updates.values():
                self._add(adapter, update)
            self._add_tokens_of_head(adapter)
        for updates in self._updates.values():
            _check_combination(updates)
        self.tensors: Mapping[str, TensorInfo] = {
            **base.tensors,
            **{name: TensorInfo(torch.float32, self._shape_of(name)) for name in {*self._untied, *self._updates}},
        }

    @property
    def name(self) -> str:
        """Name of the base, and those of the adapters."""
        return "-".join((self._base.name, *(adapter.name for adapter in self._adapters)))

    @property
    def origin(self) -> str | None:
        """None: no repository on the hub has the merged weights."""
        return None

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of the base's config.json."""
        return self._base.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Content of the base's generation_config.json, or {}."""
        return self._base.generation_config

    @property
    def tokenizer(self) -> TokenizerFiles:
        """The base's tokenizer."""
        return self._base.tokenizer

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of an embedding model; None if the model generates text."""
        return self._base.pooling

    @cached_property
    def _source_hashes(self) -> Mapping[str, str]:
        hashes = dict(self._base.source_hashes())
        for number, adapter in enumerate(self._adapters):
            hashes |= {f"{ADAPTER_PREFIX}{number}/{name}": value for name, value in adapter.source_hashes.items()}
        return hashes

    def source_hashes(self) -> Mapping[str, str]:
        """Returns file name → SHA-256 of every file that the engine depends on, those of adapters with a prefix."""
        return self._source_hashes

    @property
    def recipe(self) -> dict[str, Any]:
        """The names of the base and of its adapters, and their weights, for the engine's manifest."""
        adapters = [{"name": adapter.name, "weight": repr(adapter.weight)} for adapter in self._adapters]
        return {"model": self._base.name, "adapters": adapters}

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor; a merged one in fp32."""
        values = self._base.read(self._untied.get(name, name))
        if name not in self.tensors or (name not in self._updates and name not in self._untied):
            return values
        values = values.float()
        for change in self._updates.get(name, ()):
            values = (_with_bias if name.endswith(".bias") else _with_weight)(values, change)
        return values

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self._base.tensors[self._untied.get(name, name)].shape

    def _add(self, adapter: Adapter, update: ModuleUpdate) -> None:
        """Finds the tensors that an update changes, and checks its shapes."""
        if update.experts_module is not None:
            for part in self._parts_of_experts(adapter, update, update.experts_module):
                self._updates.setdefault(part.tensor, []).append(Change(adapter, update, part))
            return
        kinds = (*(["weight"] if update.changes_weight else []), *(["bias"] if update.changes_bias else []))
        for kind in kinds:
            name = f"{update.module}.{kind}"
            if kind == "weight" and name not in self._base.tensors and update.module == HEAD:
                self._untied[name] = self._table(adapter, name)
            elif name not in self._base.tensors:
                raise _no_tensor(adapter, name)
            _check_shape(adapter, update, kind, self._shape_of(name))
            self._updates.setdefault(name, []).append(Change(adapter, update))
        # PEFT changes the embedding alone, while the head keeps the model's weight; only rows of tokens change both.
        head = f"{HEAD}.weight"
        is_tied = not any(name.endswith(head) for name in self._base.tensors)
        if is_tied and update.module.rpartition(".")[2] in TABLES and update.parts.keys() & {"embedding_a", "weight"}:
            self._untied.setdefault(head, f"{update.module}.weight")

    def _add_tokens_of_head(self, adapter: Adapter) -> None:
        """Adds an embedding's rows of tokens to a tied head that has factors: PEFT adds the product to these rows."""
        head = f"{HEAD}.weight"
        own = adapter.updates.get(HEAD)
        if head not in self._untied or own is None or "a" not in own.parts:
            return
        tokens = [change for change in self._updates.get(self._untied[head], ()) if change.adapter is adapter]
        self._updates[head][:0] = [change for change in tokens if "token_rows" in change.update.parts]

    def _parts_of_experts(self, adapter: Adapter, update: ModuleUpdate, module: str) -> Sequence[ExpertsPart]:
        """Finds the parameter of experts that an update's shapes fit, as its tensors in the checkpoint."""
        shapes = adapter.shape(update, "a"), adapter.shape(update, "b")
        found = find_parts(module, self._base.tensors)
        for parts in found.values():
            experts, rows, columns = parts[0].shape
            rank = adapter.config.rank_of(parts[0].parameter)
            if shapes == ((experts * rank, columns), (rows, experts * rank)):
                return parts
        if not found:
            raise _no_tensor(adapter, module)
        raise adapter.error(f"{update.module} has factors {list(shapes[0])} and {list(shapes[1])}, as no parameter has")

    def _table(self, adapter: Adapter, head: str) -> str:
        """The embedding's weight, which is the head's as well."""
        ends = tuple(f".{table}.weight" for table in TABLES)
        found = [name for name in self._base.tensors if f".{name}".endswith(ends)]
        if len(found) != 1:
            raise _no_tensor(adapter, head)
        return found[0]


def _no_tensor(adapter: Adapter, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the adapter {adapter.name} changes {name}, which the checkpoint does not have",
        "it was trained for another model, or the model's weights are stored in another form",
        "Merge the adapter with PEFT, and build the merged model.",
    )


def _check_shape(adapter: Adapter, update: ModuleUpdate, kind: str, shape: tuple[int, ...]) -> None:
    """Checks that the shapes of an update fit those of the tensor that it changes.

    Raises:
        EngineError: they do not.
    """
    wanted: dict[str, tuple[int, ...]] = {kind: shape}
    rank = adapter.config.rank_of(update.module)
    if kind == "bias":
        wanted["b_bias"] = shape
    elif len(shape) == 2:
        rows, columns = shape[::-1] if adapter.config.fan_in_fan_out else shape
        wanted |= {"a": (rank, columns), "b": (rows, rank), "magnitude": (rows,)}
        wanted |= {"embedding_a": (rank, shape[0]), "embedding_b": (shape[1], rank)}
        ids = adapter.config.tokens_of(update.module)
        if "token_rows" in update.parts and max(ids, default=0) >= shape[0]:
            raise adapter.error(f"{update.module} has {shape[0]} rows, and no token {max(ids)}")
        wanted["token_rows"] = (len(ids), shape[1])
    elif update.parts.keys() - {"weight", "bias", "b_bias"}:
        raise adapter.error(f"{update.module}.{kind} has shape {list(shape)}, which is no matrix")
    for part, expected in wanted.items():
        if part in update.parts and adapter.shape(update, part) != expected:
            found = list(adapter.shape(update, part))
            raise adapter.error(
                f"{update.parts[part]} has shape {found}, but {update.module}.{kind} of the model {list(shape)}"
            )


def _check_combination(updates: Sequence[Change]) -> None:
    """Refuses updates of one tensor whose result would depend on their order, or that have a weight without meaning."""
    for adapter, update, _ in updates:
        if update.is_linear_in_scale:
            continue
        if adapter.weight != 1:
            raise UsageError(
                f"the adapter {adapter.name} cannot have a weight", f"it replaces numbers of {update.module}"
            )
        if any(other is not adapter for other, _, _ in updates):
            names = " and ".join(one.name for one, _, _ in updates)
            raise UsageError(f"the adapters {names} cannot be combined", f"{adapter.name} replaces {update.module}")


def _with_weight(values: torch.Tensor, change: Change) -> torch.Tensor:
    """Applies a change to a module's weight, in fp32; values: as the checkpoint stores them."""
    adapter, update, part = change
    if "weight" in update.parts:
        values = adapter.read(update, "weight")
    product = adapter.product(update, part)
    if product is not None:
        is_transposed = adapter.config.fan_in_fan_out and "a" in update.parts
        values = values + adapter.weight * (product.t() if is_transposed else product)
        if "magnitude" in update.parts:
            rows = values.t() if is_transposed else values
            rows = rows * (adapter.read(update, "magnitude") / torch.linalg.norm(rows, dim=1))[:, None]
            values = rows.t() if is_transposed else rows
    if "token_rows" in update.parts:
        ids = torch.tensor(adapter.config.tokens_of(update.module))
        values = values.index_copy(0, ids, adapter.read(update, "token_rows"))
    if not bool(torch.isfinite(values).all()):
        raise EngineError(f"{update.module} with the adapter {adapter.name} has numbers that are not finite")
    return values


def _with_bias(values: torch.Tensor, change: Change) -> torch.Tensor:
    """Applies a change to a module's bias, in fp32."""
    adapter, update, _ = change
    if "bias" in update.parts:
        values = adapter.read(update, "bias")
    if "b_bias" in update.parts:
        scale = adapter.config.scale_of(update.module)
        values = values + adapter.weight * scale * adapter.read(update, "b_bias")
    return values
