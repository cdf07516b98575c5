"""What an engine holds beside its model to guess what that says next: a smaller model, or its own first layers."""

import json
from dataclasses import dataclass, replace

from enginewright.builder.assembly import Assembly, BuildConfig, assemble, check_quant, merged_weights
from enginewright.builder.checkpoint import Checkpoint, open_checkpoint
from enginewright.builder.checkpoint.hub import CheckConfig
from enginewright.builder.lower import Weight, lower, pack_rows
from enginewright.builder.progress import Progress
from enginewright.dtypes import KV_CACHES
from enginewright.errors import UsageError
from enginewright.manifest import DRAFT, NGRAM, SKIP, plan_section
from enginewright.passes.first_layers import first_layers
from enginewright.passes.pipeline import run_for_target
from enginewright.passes.quant.method import Calibration
from enginewright.passes.weights import open_rows
from enginewright.plugins.target import targets_of
from enginewright.runtime.count import parse_count


@dataclass(frozen=True)
class FirstLayers:
    """The first `count` layers of the model itself, with its last norm and its head."""

    count: int


@dataclass(frozen=True)
class Automatic:
    """The best that there is for this checkpoint, as the engine's default: it looks guesses up, whatever the model."""


Draft = Checkpoint | FirstLayers | Automatic


def open_draft(text: str, *, only_cached: bool = False, check_config: CheckConfig | None = None) -> Draft:
    """What `--draft` names: `auto`, `skip:8`, or a checkpoint as `open_checkpoint` has it.

    Raises:
        UsageError: the number of layers is none; or what `open_checkpoint` raises.
    """
    if text == "auto":
        return Automatic()
    form, colon, count = text.partition(":")
    if form != SKIP:
        return open_checkpoint(text, only_cached=only_cached, check_config=check_config)
    try:
        return FirstLayers(parse_count(count))
    except UsageError as error:
        fix = f"Say how many of the model's first layers guess: {SKIP}:8."
        raise UsageError(f"--draft {text} names no number of layers", str(error) if colon else "", fix) from error


def check_draft(checkpoint: Checkpoint, draft: Draft, config: BuildConfig) -> None:
    """Refuse a model that cannot guess for another one, before anything is read."""
    if not isinstance(draft, FirstLayers | Automatic):
        check_quant(draft, config)
        check_tokenizer(checkpoint, draft)


def add_draft(target: Assembly, draft: Draft, progress: Progress, calibration: Calibration | None = None) -> Assembly:
    """What the engine of `target` holds with a draft beside its model, built by the same config.

    Raises:
        UsageError: it is no draft for this model.
    """
    if isinstance(draft, FirstLayers):
        return with_first_layers(target, draft)
    if isinstance(draft, Automatic):
        generates = all(plan.generates for plan in target.plans.values())
        return replace(target, speculate=NGRAM if generates else None)
    dump = target.config.dump_graphs
    config = replace(target.config, dump_graphs=dump / DRAFT if dump else None)
    return with_draft(target, assemble(draft, config, progress, calibration))


def with_first_layers(target: Assembly, draft: FirstLayers) -> Assembly:
    """They are cut off the graph that the model's plans are made of, so their weights are the model's, and no bytes of
    their own.

    Raises:
        UsageError: the model has no more layers than that, or writes no text.
    """
    if not all(plan.generates for plan in target.plans.values()):
        raise UsageError(f"--draft {SKIP}:{draft.count} is not possible", f"{target.checkpoint.name} writes no text")
    config = target.config
    dense, kv_dtype = first_layers(target.dense, draft.count), KV_CACHES[config.kv_cache_dtype].name
    lowered = []
    for one in targets_of(config.targets):
        dump = config.dump_graphs / SKIP / one.name if config.dump_graphs else None
        ragged = run_for_target(dense.clone(), config.method, one, dump, kv_dtype)
        lowered.append(lower(ragged, one, target.max_seq_len, config.batch_invariant))
    for name, weight in merged_weights(lowered).items():
        if name not in target.weights or target.weights[name].form != weight.form:
            raise AssertionError(f"the first layers have another {name} than the model")
    return replace(
        target,
        roles={**target.roles, SKIP: {"layers": draft.count}},
        kernels={**target.kernels, **{name: kernel for one in lowered for name, kernel in one.kernels.items()}},
        files={**target.files, **{plan_section(one.plan.target, SKIP): one.plan.to_json() for one in lowered}},
    )


def with_draft(target: Assembly, draft: Assembly) -> Assembly:
    """What the engine of `target` holds with the model of `draft` beside its own. A weight that has the same name and
    the same bytes in both is stored once.

    Raises:
        UsageError: their logits are not of the same tokens.
    """
    sizes = [next(iter(one.plans.values())).vocab_size for one in (target, draft)]
    for one in (target, draft):
        if not all(plan.generates for plan in one.plans.values()):
            raise _no_draft(target.checkpoint, draft.checkpoint, f"{one.checkpoint.name} writes no text")
    if sizes[0] != sizes[1]:
        raise _no_draft(target.checkpoint, draft.checkpoint, f"it has {sizes[1]} tokens, and the model {sizes[0]}")
    names = {
        name: name if _same(weight, target.weights.get(name)) else f"{DRAFT}/{name}"
        for name, weight in draft.weights.items()
    }
    own = {names[name]: weight for name, weight in draft.weights.items() if names[name] != name}
    files = {
        plan_section(platform, DRAFT): plan.with_weights(names.__getitem__).to_json()
        for platform, plan in draft.plans.items()
    }
    return replace(
        target,
        roles={
            **target.roles,
            DRAFT: {"name": draft.checkpoint.name, "model_type": str(draft.checkpoint.config["model_type"])},
        },
        weights={**target.weights, **own},
        kernels={**target.kernels, **draft.kernels},
        files={**target.files, **files},
        notes=[*target.notes, *(f"{DRAFT}: {note}" for note in draft.notes)],
    )


def _same(one: Weight, other: Weight | None) -> bool:
    """Reads both as far as they are alike."""
    if other is None or one.form != other.form:
        return False
    pieces = (pack_rows(open_rows(weight.value), weight.form) for weight in (one, other))
    return all(mine() == its() for mine, its in zip(*pieces, strict=True))


def check_tokenizer(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises UsageError where a draft's tokens are not those of the model that it is for."""
    own, its = (json.loads(one.tokenizer.tokenizer_json) for one in (checkpoint, draft))
    differing = [key for key in sorted({*own, *its}) if own.get(key) != its.get(key)]
    if differing:
        raise _no_draft(checkpoint, draft, f"its tokenizer.json differs in {', '.join(differing)}")


def _no_draft(checkpoint: Checkpoint, draft: Checkpoint, why: str) -> UsageError:
    fix = "Take a model of the same tokenizer and vocabulary."
    return UsageError(f"{draft.name} is no draft for {checkpoint.name}", why, fix)
