"""`engine adapter`: prepares a LoRA adapter for one engine, laid out as kernels read it.

The matrices of the checkpoint's layers become those of the engine's sites (adapter_sites.py), as the weights did: rows
of B are picked and get the weight's factors of rows, and alpha / rank; columns of A are sorted and get its factors of
columns, by which the layer's input was divided. DoRA's lengths of rows are settled against the engine's own weights.
Source: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2402.09353
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright import __version__
from enginewright.adapter_file import (
    ADAPTER,
    MAX_INVOCATION_TOKENS,
    MAX_RANK,
    AdapterEntries,
    AdapterFile,
    FactorDType,
    SiteEntry,
)
from enginewright.adapter_plan import linear_weight, table_weight
from enginewright.adapter_sites import Site, read_sites
from enginewright.builder.adapters.adapter import Adapter, ModuleUpdate
from enginewright.builder.adapters.expert_layers import ExpertsLayer
from enginewright.builder.adapters.head_layers import HeadsLayer
from enginewright.builder.adapters.layers import EngineLayer, open_section, open_weight
from enginewright.builder.adapters.names import BaseNames
from enginewright.builder.adapters.vocabulary_layers import OutputHead, Table
from enginewright.builder.lower import PackedForm, pack
from enginewright.builder.progress import Progress, Silent
from enginewright.dtypes import DTYPES
from enginewright.engine_file import EngineWriter
from enginewright.errors import UnsupportedModelError, UsageError
from enginewright.manifest import About
from enginewright.output_file import require_writable, same_file
from enginewright.runtime.commands.quality import QUALITY, QualityReport
from enginewright.runtime.engine import Engine

MERGE = "Merge it at build: engine build --merge ADAPTER."
# Sections of a site at most, without those of its runs: A, its scales, a bias, a gain, and numbers, rows and scales of
# rows that are replaced
SECTIONS = 7
SECTIONS_OF_RUN = 2  # B and its scales
NO_SITE = (
    "routers, norms, and layers that the model does not have are no adapter sites, and the output head and embeddings "
    "are in engines of this release that have code for a CPU"
)


@dataclass(frozen=True)
class AdapterReport:
    """A prepared adapter."""

    path: Path  # its file
    name: str  # its name
    engine: str  # name of the engine that it is for
    size_bytes: int  # size of the file
    content_hash: str  # SHA-256 of its content
    modules: int  # number of the checkpoint's layers that it changes
    sites: int  # number of the engine's layers that it changes
    max_rank: int  # largest rank of a layer's matrices
    quality: QualityReport  # result of the quality gate

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON's types."""
        return asdict(self) | {"path": str(self.path), "quality": self.quality.to_dict()}


def prepare(
    adapter: Adapter,
    engine: Engine,
    output: Path,
    progress: Progress | None = None,
    dtype: FactorDType | None = None,
    measure: Callable[[AdapterFile], QualityReport] | None = None,
) -> AdapterReport:
    """Writes an adapter's file for an engine. It appears complete under its name, or not at all.

    Args:
        adapter: the adapter, as PEFT has saved it.
        engine: the engine, open.
        output: the adapter's file.
        progress: receiver of progress; None is nobody.
        dtype: dtype of the adapter's matrices. None: INT8 for layers whose weights have at most 8 bits, where the error
            of a rounded weight is at least as large, and BFLOAT16 for the others.
        measure: quality gate of the prepared adapter; None: it is not measured.

    Raises:
        UsageError: the engine takes no adapters, or the file cannot be written there.
        UnsupportedModelError: the adapter changes something that has no site in the engine, or its rank is too large.
        EngineError: shapes do not fit, or numbers are not finite.
        QualityGateError: `measure` refuses it.
    """
    require_writable(output, regular=True)
    if same_file(output, engine.file.path):
        raise UsageError(f"{output} cannot be written", "it is the engine", "Name another file with --output.")
    progress = progress or Silent()
    progress.phase("find the layers")
    layers = _open_layers(engine)
    adapter = adapter.named_as(BaseNames(name for layer in layers for name in layer.names))
    changed = _check(adapter, layers, engine.file.path, engine.plan.vocab_size)
    layers = [layer for layer in layers if layer.site.key in changed]
    calls = {name: call for call in engine.plan.calls if (name := linear_weight(call)) is not None}
    lookups = {name: call for call in engine.plan.calls if (name := table_weight(call)) is not None}
    progress.phase("prepare the matrices", len(layers))
    entries: list[SiteEntry] = []
    with EngineWriter(output, 2 + sum(SECTIONS + SECTIONS_OF_RUN * len(layer.runs) for layer in layers)) as writer:
        for layer in layers:
            site = layer.site
            bias = None if site.bias is None else open_section(engine, site.bias)[0](0, site.rows)
            weight = open_weight(engine, (lookups if site.kind == "table" else calls)[site.weight])
            entry, tensors = layer.changed(adapter, weight, bias, dtype or _dtype_for(engine, site.weight))
            for (name, form), values in zip(entry.forms().items(), tensors, strict=True):
                packed = PackedForm(*form)
                typed = values.bfloat16() if packed.dtype == "bf16" else values
                writer.add(name, pack(typed, packed), **asdict(packed))
            entries.append(entry)
            progress.advance(1)
        writer.add(ADAPTER, AdapterEntries(tuple(entries), adapter.config.invocation_tokens).to_json())
        about = _about(adapter, engine)
        quality = QualityReport("off")
        if measure is not None:
            writer.write_header(about)
            with AdapterFile.open(writer.temporary_path) as finished:
                quality = measure(finished)
        writer.add(QUALITY, quality.to_json(), evidence=True)
        manifest = writer.commit(about)
    return AdapterReport(
        path=output,
        name=adapter.name,
        engine=engine.manifest.name,
        size_bytes=output.stat().st_size,
        content_hash=manifest.content_hash,
        modules=len(adapter.updates),
        sites=len(entries),
        max_rank=max((piece.rank for entry in entries for piece in entry.pieces), default=0),
        quality=quality,
    )


def _open_layers(engine: Engine) -> list[EngineLayer]:
    sites = read_sites(engine.file).sites
    tables = {site.weight: site.runs[0].module for site in sites if site.kind == "table"}
    return [_open_layer(engine, site, tables.get(site.weight)) for site in sites]


def _open_layer(engine: Engine, site: Site, table: str | None) -> EngineLayer:
    """Opens a layer; table: name of the embedding with the same weight."""
    if site.kind == "output_head":
        return OutputHead(engine.file, site, table)
    if site.kind == "table":
        return Table(engine.file, site)
    kind = ExpertsLayer if site.experts else HeadsLayer if site.heads else EngineLayer
    return kind(engine.file, site)


def _dtype_for(engine: Engine, weight: str) -> FactorDType:
    dtype = engine.weight(weight)[1].dtype
    return "i8" if dtype is not None and DTYPES[dtype].bits <= 8 else "bf16"


def _about(adapter: Adapter, engine: Engine) -> About:
    config = adapter.config
    recipe = {"rank": config.rank, "alpha": repr(config.alpha)}
    return About(
        builder_version=__version__,
        name=adapter.name,
        model_type=engine.manifest.model_type,
        targets=(),
        recipe={**recipe, "use_rslora": config.use_rslora, "use_dora": config.use_dora},
        sources=dict(adapter.source_hashes),
        limits=engine.manifest.limits,
        engine=engine.manifest.content_hash,
    )


def _check(adapter: Adapter, layers: Sequence[EngineLayer], engine: Path, vocab_size: int) -> set[str]:
    """Refuses an adapter of which a part would be left out, or that does not fit the engine's layers.

    Returns:
        Names of the weights of those that it changes.
    """
    if (count := len(adapter.config.invocation_tokens)) > MAX_INVOCATION_TOKENS:
        raise adapter.error(f"{count} tokens invoke it, and at most {MAX_INVOCATION_TOKENS} are possible")
    for token in adapter.config.invocation_tokens:
        if not 0 <= token < vocab_size:
            raise adapter.error(f"the invocation token {token} is none of the engine's {vocab_size}")
    by_module: dict[str, list[EngineLayer]] = {}
    for layer in layers:
        for module in layer.modules:
            by_module.setdefault(module, []).append(layer)
    changed = set[str]()
    for update in adapter.updates.values():
        is_of_any = update.experts_module is not None or "token_rows" in update.parts
        possible = layers if is_of_any else by_module.get(update.module, ())
        own = [layer for layer in possible if layer.is_changed_by(adapter, update)]
        _check_update(adapter, update, own, engine)
        changed |= {layer.site.key for layer in own}
    return changed


def _check_update(adapter: Adapter, update: ModuleUpdate, own: Sequence[EngineLayer], engine: Path) -> None:
    """Refuses an update that does not fit; own: the engine's layers that it changes."""
    module = update.module
    if (why := _refusal(adapter, update, own)) is not None:
        what = f"the adapter {adapter.name} changes {module}, which it cannot in {engine}"
        raise UnsupportedModelError(what, why, MERGE)
    if update.changes_bias and any(layer.site.bias is None for layer in own):
        what = f"the adapter {adapter.name} changes the bias of {module}, which {engine} does not have"
        raise UnsupportedModelError(what, fix="Merge the adapter with PEFT, and build the merged model.")
    rank = max(layer.rank_of(adapter, update) for layer in own)
    if rank > MAX_RANK and update.parts.keys() & {"a", "embedding_a"}:
        what = f"{module} of the adapter {adapter.name} has rank {rank}"
        raise UnsupportedModelError(what, f"at most {MAX_RANK} is possible", MERGE)
    if update.experts_module is not None:
        return  # shapes have decided that it changes the layer
    rows = set().union(*(layer.rows_of(module) for layer in own))
    if rows != set(range(count := len(rows))):
        what = f"the adapter {adapter.name} changes {module}, which it cannot in {engine}"
        raise UnsupportedModelError(what, "only some of its rows are in layers that adapters can change", MERGE)
    columns = own[0].stored_columns
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(("bias", "b_bias", "magnitude"), (count,))
    wanted |= {"a": (rank, columns), "b": (count, rank), "weight": (count, columns)}
    wanted |= {"embedding_a": (rank, count), "embedding_b": (columns, rank)}
    if "token_rows" in update.parts:
        tokens = adapter.config.tokens_of(update.module)
        if max(tokens, default=0) >= count:
            raise _adds_tokens(adapter, module, f"it has the token {max(tokens)}, and the engine {count} tokens")
        wanted["token_rows"] = (len(tokens), columns)
    for part in update.parts:
        found = adapter.shape(update, part)
        has_more = found[-1] if part == "embedding_a" else found[0] if part == "weight" and found else 0
        if own[0].site.kind != "linear" and has_more > count:
            raise _adds_tokens(adapter, module, f"{update.parts[part]} has {has_more} tokens, and the engine {count}")
        if found != wanted[part]:
            why = f"{update.parts[part]} has shape {list(found)}, and the engine's layer {list(wanted[part])}"
            raise adapter.error(why)


def _adds_tokens(adapter: Adapter, module: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the adapter {adapter.name} adds tokens to {module}",
        f"{why}: its tokenizer does not know them",
        "Merge the adapter with PEFT, save the model with the tokenizer that it was trained with, and build it.",
    )


def _refusal(adapter: Adapter, update: ModuleUpdate, layers: Sequence[EngineLayer]) -> str | None:
    """Says why an update cannot be applied to the layers that it changes; None if it can."""
    if not layers and update.experts_module is not None:
        shapes = " and ".join(str(list(adapter.shape(update, part))) for part in ("a", "b"))
        return f"its factors of shape {shapes} fit no experts that adapters can change"
    if not layers:
        return NO_SITE
    if "weight" in update.parts and layers[0].site.kind == "linear":
        return "it replaces the whole layer (modules_to_save), and adapters add to layers"
    if adapter.config.invocation_tokens and update.parts.keys() & {"token_rows", "embedding_a"}:
        return "tokens invoke it, and PEFT would change the tokens before them, too"
    if "token_rows" in update.parts and update.parts.keys() & {"a", "embedding_a", "weight"}:
        return "it has rows of tokens and other changes of the same layer, which PEFT does not compute"
    if update.parts.keys() - {"a", "b"} and any(layer.site.experts for layer in layers):
        return "it has lengths (DoRA) or a bias of a single expert's layer, which PEFT with transformers 5 refuses, too"
    if update.parts.keys() - {"a", "b"} and any(layer.site.heads for layer in layers):
        return "it has lengths (DoRA) or biases, which heads have only if it is merged"
    if adapter.config.invocation_tokens and any(layer.site.heads for layer in layers):
        return "tokens invoke it, and it would change keys and values of the tokens before them"
    return None
