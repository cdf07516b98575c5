"""The ways to guess, by the names that `speculate` has for them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from enginewright.runtime.engine import Engine
from enginewright.runtime.memory_plan import MemoryPlan, RuntimeConfig
from enginewright.runtime.speculation.draft import DraftModel, kv_bytes_of_draft
from enginewright.runtime.speculation.lookup import PromptLookup
from enginewright.runtime.speculation.proposer import Proposer
from enginewright.runtime.speculation.speculator import Speculator
from enginewright.runtime.step_cost import StepCost

DRAFT_METHOD = "draft"
METHODS: Mapping[str, Callable[[Engine, RuntimeConfig, MemoryPlan], Proposer]] = {
    "ngram": lambda engine, config, memory_plan: PromptLookup(config.guesses),
    DRAFT_METHOD: DraftModel.open,
}


def config_of_model(engine: Engine, config: RuntimeConfig) -> RuntimeConfig:
    """Limits of the model itself: a draft model takes a part of the memory for KV caches.

    Raises:
        UsageError: the engine has no draft model, and one is to guess.
    """
    if config.speculate != DRAFT_METHOD:
        return config
    share = 1 / (1 + kv_bytes_of_draft(engine, config, 1.0))
    if config.kv_cache_memory is None:
        return config
    return replace(config, kv_cache_memory=int(share * config.kv_cache_memory))


def open_speculator(engine: Engine, config: RuntimeConfig, memory_plan: MemoryPlan) -> Speculator | None:
    """What guesses for an engine, or None where nothing is to be guessed.

    Args:
        memory_plan: of the model itself.

    Raises:
        UsageError: the engine has no draft model, and one is to guess.
    """
    if not config.guesses:
        return None
    proposer, limits = METHODS[config.speculate](engine, config, memory_plan), memory_plan.limits
    return Speculator(proposer, StepCost.of(engine), config.guesses, min(limits.tokens, limits.logit_rows))
