"""Adds a source of draft tokens to an engine.

It is a smaller model, the model's own first layers, the multi-token prediction layer of its checkpoint, or a head that
was trained for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginewright.builder.assembly import Assembly, BuildConfig, assemble, check_quant, merged_weights, plan_files
from enginewright.builder.checkpoint import Checkpoint, open_checkpoint
from enginewright.builder.checkpoint.head import HeadFolder, find_head
from enginewright.builder.checkpoint.hub import CheckConfig
from enginewright.builder.heads.base import HeadGraph, TargetModel, no_head
from enginewright.builder.heads.eagle import build_eagle
from enginewright.builder.heads.medusa import build_medusa
from enginewright.builder.lower import Lowered, Weight, lower, pack_rows
from enginewright.builder.models import build_mtp_graph
from enginewright.builder.models.blocks.mtp import LEFT_OUT
from enginewright.builder.progress import Progress
from enginewright.dtypes import KV_CACHES
from enginewright.errors import UsageError
from enginewright.manifest import DRAFT, EAGLE, MEDUSA, MTP, NGRAM, SKIP, plan_section
from enginewright.passes.first_layers import first_layers
from enginewright.passes.pipeline import run_for_target, run_pipeline
from enginewright.passes.quant.method import Calibration
from enginewright.passes.show_hidden import ShowHidden
from enginewright.passes.weights import open_rows
from enginewright.plan import HIDDEN, Plan
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.target import targets_of
from enginewright.runtime.count import parse_count


@dataclass(frozen=True)
class FirstLayers:
    """A draft of the model's first layers, with its last norm and its head."""

    count: int  # number of layers


@dataclass(frozen=True)
class Automatic:
    """The best draft of this checkpoint, as the engine's default: its MTP layer if it has one, otherwise lookup."""


HEADS = {EAGLE: build_eagle, MEDUSA: build_medusa}
PHASE = "add the draft"  # its weights are compared with the model's
Draft = Checkpoint | HeadFolder | FirstLayers | Automatic


def open_draft(text: str, *, only_cached: bool = False, check_config: CheckConfig | None = None) -> Draft:
    """Opens the draft that `--draft` names: `auto`, `skip:8`, the folder of a head, or a checkpoint.

    Args:
        text: the option's value.
        only_cached: True if nothing may be downloaded.
        check_config: as in `open_checkpoint`.

    Raises:
        UsageError: the number of layers is not valid; other errors are those of `find_head` and `open_checkpoint`.
    """
    if text == "auto":
        return Automatic()
    form, colon, count = text.partition(":")
    if form != SKIP:
        head = find_head(Path(text))
        return head or open_checkpoint(text, only_cached=only_cached, check_config=check_config)
    try:
        return FirstLayers(parse_count(count))
    except UsageError as error:
        fix = f"Say how many of the model's first layers are the draft: {SKIP}:8."
        raise UsageError(f"--draft {text} names no number of layers", str(error) if colon else "", fix) from error


def source_of(draft: Draft | None) -> tuple[str, Checkpoint | HeadFolder] | None:
    """Returns the role of a draft that has files of its own, and their reader; None for other drafts."""
    match draft:
        case None | FirstLayers() | Automatic():
            return None
        case HeadFolder():
            return draft.role, draft
        case _:
            return DRAFT, draft


def check_draft(checkpoint: Checkpoint, draft: Draft | None, config: BuildConfig) -> None:
    """Refuses a draft that does not fit the model, before anything is read.

    Args:
        checkpoint: the model's checkpoint.
        draft: the draft, or None.
        config: options of the build.

    Raises:
        UsageError: it does not fit.
    """
    if draft is None or isinstance(draft, FirstLayers):
        _check_no_quant(config, "there is no draft" if draft is None else "first layers read the model's own weights")
    elif config.draft_quant is not None and config.draft_quant.calibrated:
        what = f"--draft-quant {config.draft_quant.name} is not possible"
        raise UsageError(what, "it has to be calibrated, and the texts are the model's", "Use int4-rtn, for example.")
    if isinstance(draft, HeadFolder):
        check_rotation(config, draft.role)
    if not isinstance(draft, None | HeadFolder | FirstLayers | Automatic):
        check_quant(draft, config.for_draft)
        check_tokenizer(checkpoint, draft)


def _check_no_quant(config: BuildConfig, why: str) -> None:
    if config.draft_quant is not None:
        raise UsageError("--draft-quant means nothing here", why, "Leave it out.")


def add_draft(target: Assembly, draft: Draft, progress: Progress, calibration: Calibration | None = None) -> Assembly:
    """Adds a draft to an engine's model, built by `target.config.for_draft`.

    Args:
        target: the engine without a draft.
        draft: the draft.
        progress: receiver of progress.
        calibration: texts for a method that needs some.

    Raises:
        UsageError: the draft does not fit this model.
    """
    if isinstance(draft, FirstLayers):
        return with_first_layers(target, draft)
    if isinstance(draft, Automatic):
        if not all(plan.generates for plan in target.plans.values()):
            _check_no_quant(target.config, f"{target.checkpoint.name} writes no text, so it has no draft")
            return target
        graph = build_mtp_graph(target.checkpoint, target.max_seq_len)
        if graph is None:
            _check_no_quant(target.config, f"{target.checkpoint.name} has no MTP layer, so draft tokens are looked up")
            return replace(target, speculate=NGRAM)
        progress.phase(PHASE)
        without_note = replace(
            target, notes=[note for note in target.notes if not note.endswith(LEFT_OUT)], speculate=MTP
        )
        return with_head(without_note, MTP, HeadGraph(graph, ShowHidden(), ShowHidden()), {"layers": 1})
    if isinstance(draft, HeadFolder):
        name = target.checkpoint.name
        if not all(plan.generates for plan in target.plans.values()):
            raise no_head(draft.name, name, "that writes no text")
        progress.phase(PHASE)
        model = TargetModel.of(name, target.checkpoint.config, target.dense, target.max_seq_len)
        return with_head(target, draft.role, HEADS[draft.role](draft, model), {"name": draft.name})
    dump = target.config.dump_graphs
    config = replace(target.config.for_draft, dump_graphs=dump / DRAFT if dump else None)
    assembled = assemble(draft, config, progress, calibration)
    progress.phase(PHASE)
    return with_draft(target, assembled)


def with_first_layers(target: Assembly, draft: FirstLayers) -> Assembly:
    """Adds the model's first layers as a draft, cut off the graph that its plans are made from.

    Their weights are the model's, and take no bytes of their own.

    Args:
        target: the engine without a draft.
        draft: number of layers.

    Raises:
        UsageError: the model has no more layers than that, or writes no text.
    """
    if not all(plan.generates for plan in target.plans.values()):
        raise UsageError(f"--draft {SKIP}:{draft.count} is not possible", f"{target.checkpoint.name} writes no text")
    lowered = _lower(target, first_layers(target.dense, draft.count), SKIP)
    for name, weight in merged_weights(lowered).items():
        if name not in target.weights or target.weights[name].form != weight.form:
            raise AssertionError(f"the first layers have another {name} than the model")
    return replace(
        target,
        roles={**target.roles, SKIP: {"layers": draft.count}},
        kernels={**target.kernels, **{name: kernel for one in lowered for name, kernel in one.kernels.items()}},
        files={**target.files, **{plan_section(one.plan.target, SKIP): one.plan.to_json() for one in lowered}},
    )


def check_rotation(config: BuildConfig, role: str) -> None:
    """Checks that a head's model is not rotated.

    Args:
        config: options of the build.
        role: role of the head.

    Raises:
        UsageError: it is.
    """
    if config.rotate:
        why = f"the {role} head was trained for hidden states that are not rotated"
        raise UsageError("--rotate does not work with this --draft", why, "Leave out one of them.")


def with_head(target: Assembly, role: str, head: HeadGraph, recipe: Mapping[str, Any]) -> Assembly:
    """Adds a head as a draft; the model's own plans then output their hidden states.

    The head's weights are quantized without calibration: no texts can be streamed through it alone.

    Args:
        target: the engine without a draft.
        role: role of the head.
        head: graph of the head.
        recipe: entry of the recipe.
    """
    check_rotation(target.config, role)
    method, dense = target.config.for_draft.method.without_data, list[ir.Model]()
    config = replace(target.config, quant=method)
    notes = json.loads(head.graph.metadata_props.get("enginewright.notes", "{}"))
    dump = config.dump_graphs / role if config.dump_graphs else None
    run_pipeline(head.graph, method, dump, KV_CACHES[config.kv_cache_dtype].name, keep=dense.append)
    shown = _lower(target, target.dense, HIDDEN, hidden=head.reads, is_model=True)
    model = replace(
        target,
        plans={one.plan.target: one.plan for one in shown},
        kernels={name: kernel for one in shown for name, kernel in one.kernels.items()},
        files={**target.files, **plan_files(shown)},
        notes=[*target.notes, *(f"{role}: {count} weights: {text}" for text, count in notes.items())],
    )
    lowered = _lower(replace(model, config=config), dense[0], role, hidden=head.gives)
    plans, weights = {one.plan.target: one.plan for one in lowered}, merged_weights(lowered)
    kernels = {name: kernel for one in lowered for name, kernel in one.kernels.items()}
    return _with_role(model, role, recipe, plans, weights, kernels)


def _lower(
    target: Assembly, dense: ir.Model, name: str, hidden: ShowHidden | None = None, *, is_model: bool = False
) -> list[Lowered]:
    """Lowers a dense graph for each platform of the engine; drafts are computed by one rank.

    Args:
        target: the engine.
        dense: the graph.
        name: folder of its dumped graphs.
        hidden: pass that shows hidden states, or None.
        is_model: True if it is the engine's own model.
    """
    config, lowered = target.config, []
    max_seq_len = min(target.max_seq_len, int(dense.metadata_props["enginewright.max_seq_len"]))
    for one in targets_of(config.targets):
        dump = config.dump_graphs / name / one.name if config.dump_graphs else None
        kv_dtype = KV_CACHES[config.kv_cache_dtype].name
        ragged = run_for_target(dense.clone(), config.method, one, dump, kv_dtype, hidden)
        ranks = config.ranks_of(one) if is_model else 1
        lowered.append(lower(ragged, one, max_seq_len, config.batch_invariant, ranks))
    return lowered


def with_draft(target: Assembly, draft: Assembly) -> Assembly:
    """Adds a model as a draft.

    Args:
        target: the engine without a draft.
        draft: the model.

    Raises:
        UsageError: their logits belong to different tokens.
    """
    sizes = [next(iter(one.plans.values())).vocab_size for one in (target, draft)]
    for one in (target, draft):
        if not all(plan.generates for plan in one.plans.values()):
            raise _no_draft(target.checkpoint, draft.checkpoint, f"{one.checkpoint.name} writes no text")
    if sizes[0] != sizes[1]:
        raise _no_draft(target.checkpoint, draft.checkpoint, f"it has {sizes[1]} tokens, and the model {sizes[0]}")
    recipe = {"name": draft.checkpoint.name, "model_type": str(draft.checkpoint.config["model_type"])}
    both = _with_role(target, DRAFT, recipe, draft.plans, draft.weights, draft.kernels)
    return replace(both, notes=[*target.notes, *(f"{DRAFT}: {note}" for note in draft.notes)])


def _with_role(
    target: Assembly,
    role: str,
    recipe: Mapping[str, Any],
    plans: Mapping[str, Plan],
    weights: Mapping[str, Weight],
    kernels: Mapping[str, Specialization],
) -> Assembly:
    """Adds a model in a role. A weight with the same name and bytes in both models is stored once."""
    if target.config.draft_quant is not None:
        recipe = {**recipe, "quant": target.config.draft_quant.name}
    names = {
        name: name if _equal(weight, target.weights.get(name)) else f"{role}/{name}" for name, weight in weights.items()
    }
    files = {
        plan_section(platform, role): plan.with_renamed_weights(names.__getitem__).to_json()
        for platform, plan in plans.items()
    }
    return replace(
        target,
        roles={**target.roles, role: recipe},
        weights={**target.weights, **{names[name]: weight for name, weight in weights.items() if names[name] != name}},
        kernels={**target.kernels, **kernels},
        files={**target.files, **files},
    )


def _equal(one: Weight, other: Weight | None) -> bool:
    """Compares two weights, which are read as far as they are equal."""
    if other is None or one.form != other.form:
        return False
    pieces = (pack_rows(open_rows(weight.value), weight.form) for weight in (one, other))
    return all(mine() == its() for mine, its in zip(*pieces, strict=True))


def check_tokenizer(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises UsageError if a draft's tokens differ from those of the model.

    Args:
        checkpoint: the model's checkpoint.
        draft: the draft's checkpoint.
    """
    own, its = (json.loads(one.tokenizer.tokenizer_json) for one in (checkpoint, draft))
    differing = [key for key in sorted({*own, *its}) if own.get(key) != its.get(key)]
    if differing:
        raise _no_draft(checkpoint, draft, f"its tokenizer.json differs in {', '.join(differing)}")


def _no_draft(checkpoint: Checkpoint, draft: Checkpoint, why: str) -> UsageError:
    fix = "Take a model of the same tokenizer and vocabulary."
    return UsageError(f"{draft.name} cannot be a draft of {checkpoint.name}", why, fix)
