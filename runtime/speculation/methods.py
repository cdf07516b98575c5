"""The methods of speculative decoding by the names of the option `speculate`, and the memory that they take."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from enginewright.manifest import DRAFT, EAGLE, MEDUSA, MTP, NGRAM, ROLES, SKIP
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.adapters import adapter_bytes, model_plan
from enginewright.runtime.device.devices import Executor, open_executor
from enginewright.runtime.device.memory_plan import FREE_SHARE, MemoryPlan, limits_of, plan_memory, sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation.draft import DraftModel
from enginewright.runtime.speculation.head import HeadModel
from enginewright.runtime.speculation.lookup import PromptLookup
from enginewright.runtime.speculation.medusa import MedusaModel
from enginewright.runtime.speculation.proposer import Proposer
from enginewright.runtime.speculation.runner import DraftRunner
from enginewright.runtime.speculation.speculator import Speculator
from enginewright.runtime.step.step_cost import StepCost

METHODS: Mapping[str, Callable[[Engine, RuntimeConfig, Executor], Proposer]] = {
    NGRAM: lambda engine, config, executor: PromptLookup(config.max_draft_tokens),
    DRAFT: lambda *model: DraftModel(_open_runner(DRAFT, *model)),
    SKIP: lambda *model: DraftModel(_open_runner(SKIP, *model)),
    MTP: lambda *model: HeadModel(_open_runner(MTP, *model)),
    EAGLE: lambda *model: HeadModel(_open_runner(EAGLE, *model)),
    MEDUSA: lambda *model: MedusaModel(_open_runner(MEDUSA, *model)),
}


def _open_runner(role: str, engine: Engine, config: RuntimeConfig, executor: Executor) -> DraftRunner:
    """Opens a draft model whose KV caches hold as many tokens as those of the model, which the executor runs."""
    draft, limits = engine.for_role(role), _config_of_draft(role, engine, config, executor.memory_plan.kv_bytes)
    own = open_executor(draft, limits, executor.weights)
    try:
        return DraftRunner(own, StepCost.of(draft))
    except BaseException:
        own.close()
        raise


def with_method(engine: Engine, config: RuntimeConfig) -> RuntimeConfig:
    """Fills in the method that the engine names, where the config leaves `speculate` to the engine.

    Args:
        engine: the engine, whose manifest may name a method.
        config: limits, in which `speculate` may be None.

    Returns:
        The config with `speculate` set; "off" if the engine names no method either.
    """
    return config if config.speculate is not None else replace(config, speculate=engine.manifest.speculate or "off")


def config_of_model(engine: Engine, config: RuntimeConfig) -> RuntimeConfig:
    """Limits of the model itself: a draft model takes a share of the memory for KV caches.

    Args:
        engine: the engine of both.
        config: limits from `with_method`.

    Returns:
        The config with the memory that remains for the model's own KV caches.

    Raises:
        UsageError: the engine has no draft model of the kind that `speculate` names.
    """
    if config.speculate not in ROLES:
        return config
    ratio = _kv_ratio(config.speculate, engine, config)
    if config.kv_cache_memory is None:
        return config
    return replace(config, kv_cache_memory=int(config.kv_cache_memory / (1 + ratio)))


def _config_of_draft(role: str, engine: Engine, config: RuntimeConfig, kv_bytes: int | None = None) -> RuntimeConfig:
    """Limits of a draft model. `config` and `kv_bytes` are the model's; None: its KV caches are not planned yet."""
    length = config.max_model_len or engine.plan.max_seq_len
    return replace(
        config.on_one_rank,  # a draft model is small: it is computed where tokens are sampled
        max_model_len=min(length, engine.for_role(role).plan.max_seq_len),
        max_logit_rows=config.max_num_seqs,
        enable_lora=False,  # a draft model has the base's weights: what it proposes is verified
        # A draft model without caches takes no memory for them, but a limit has to be at least 1.
        kv_cache_memory=None if kv_bytes is None else max(int(kv_bytes * _kv_ratio(role, engine, config)), 1),
    )


def _kv_ratio(role: str, engine: Engine, config: RuntimeConfig) -> float:
    """Bytes of a draft model's KV caches over those of the model, if both hold the same number of tokens."""
    length = config.max_model_len or engine.plan.max_seq_len
    of_model, of_draft = (
        sequence_bytes(plan.caches, length, config.max_num_batched_tokens)
        for plan in (engine.plan, engine.for_role(role).plan)
    )
    return of_draft / of_model


def plan_models(
    engine: Engine, config: RuntimeConfig, free: int | None = None, *, for_running_only: bool = False
) -> tuple[MemoryPlan, MemoryPlan | None]:
    """Plans the memory of the model and of its draft model, not counting the weights.

    Args:
        engine: the engine of both.
        config: limits from `with_method`.
        free: as in `plan_memory`.
        for_running_only: as in `plan_memory`.

    Returns:
        The plan of the model, and that of the draft model; None where no draft model runs.

    Raises:
        NotEnoughMemoryError: the memory does not hold one sequence of the longest length.
        UsageError: the engine has no draft model of the kind that `speculate` names.
    """
    role, adapters = _draft_role(engine, config), adapter_bytes(engine, config)
    plan = partial(plan_memory, free=free, for_running_only=for_running_only)
    of_model = config if role is None else config_of_model(engine, config)
    own = plan(model_plan(engine, config), of_model, engine.weight_bytes, adapter_bytes=adapters)
    if role is None:
        return own, None
    limits = _config_of_draft(role, engine, config, own.kv_bytes)
    taken = engine.weight_bytes + own.arena_bytes + own.adapter_bytes
    return own, plan(engine.for_role(role).plan, limits, taken)


def plan_engine_memory(engine: Engine, config: RuntimeConfig, free: int) -> tuple[RuntimeConfig, int]:
    """Fits the limits of an engine to the free memory.

    Weights, activations and KV caches count, including those of a draft model that runs.

    Args:
        engine: the engine to open.
        config: limits.
        free: bytes that the engine may take.

    Returns:
        The limits to open the engine with, and the bytes that it takes with them.

    Raises:
        NotEnoughMemoryError: the bytes left for KV caches do not hold one sequence of the longest length.
        UsageError: the engine has no draft model of the kind that `speculate` names.
    """
    config = with_method(engine, config)
    role = _draft_role(engine, config)
    if config.kv_cache_memory is not None:
        plans = plan_models(engine, config, free)
    else:
        left = free - engine.weight_bytes - adapter_bytes(engine, config)
        left -= _arena_bytes(model_plan(engine, config), config)
        if role is not None:
            left -= _arena_bytes(engine.for_role(role).plan, _config_of_draft(role, engine, config))
        largest = replace(config, kv_cache_memory=max(int(left * FREE_SHARE), 1))
        plans = plan_models(engine, largest, free, for_running_only=True)
        # The memory that running sequences cannot use is left to other engines. `config_of_model` divides by the same.
        share = 1 if role is None else 1 + _kv_ratio(role, engine, config)
        config = replace(config, kv_cache_memory=math.ceil(plans[0].kv_bytes * share) + 1)
    taken = sum(one.arena_bytes + one.kv_bytes + one.adapter_bytes for one in plans if one is not None)
    return config, engine.weight_bytes + taken


def _draft_role(engine: Engine, config: RuntimeConfig) -> str | None:
    """Role of the draft model that proposes draft tokens; None if none does."""
    return config.speculate if config.speculate in ROLES and engine.plan.generates else None


def _arena_bytes(plan: Plan, config: RuntimeConfig) -> int:
    _, limits = limits_of(plan, config)
    return plan.arena_offsets(limits)[1]


def open_speculator(engine: Engine, config: RuntimeConfig, executor: Executor) -> Speculator | None:
    """Opens the speculator of an engine.

    Args:
        engine: the engine.
        config: limits from `with_method`.
        executor: the executor of the model itself.

    Returns:
        The speculator; None if the config allows no draft tokens.

    Raises:
        UsageError: the engine has no draft model of the kind that `speculate` names.
    """
    if config.speculate is None or not config.max_draft_tokens:
        return None
    proposer, limits = METHODS[config.speculate](engine, config, executor), executor.memory_plan.limits
    return Speculator(proposer, StepCost.of(engine), config.max_draft_tokens, min(limits.tokens, limits.logit_rows))
