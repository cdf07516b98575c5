"""Opens the KV events and the disk store of an engine's prefix cache."""

from functools import partial
from pathlib import Path

import numpy as np

from enginewright.errors import UsageError
from enginewright.runtime import env
from enginewright.runtime.cache.disk import DiskStore, identity_of
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.kv_events import KvEventSender
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.prompt_cost import PromptCost
from enginewright.runtime.step.step_cost import StepCost


def open_kv_events(engine: Engine, config: RuntimeConfig, scheduler: Scheduler) -> KvEventSender | None:
    """Starts to send events of blocks that enter and leave the prefix cache.

    Args:
        engine: the engine.
        config: limits, with the address in `kv_events`.
        scheduler: reports the blocks.

    Returns:
        The sender; None if `kv_events` is not set.

    Raises:
        EngineError: pyzmq is not installed.
        UsageError: the engine has no prefix cache, or the address is not available.
    """
    if config.kv_events is None:
        return None
    block_size = shared_block_size("kv_events", config, scheduler)
    sender = KvEventSender(
        config.kv_events, config.kv_events_replay, config.kv_events_topic, engine.plan.caches, block_size
    )
    scheduler.watch(sender.put)
    return sender


def open_disk(
    engine: Engine,
    config: RuntimeConfig,
    executor: Executor,
    scheduler: Scheduler,
    step_cost: StepCost | None,
    prompt_cost: PromptCost,
) -> DiskStore | None:
    """Starts to keep the prefix cache on disk.

    Args:
        engine: the engine.
        config: limits, with the size on disk in `kv_cache_disk`.
        executor: runs the model, and reads and writes its KV blocks.
        scheduler: saves blocks, and reads them for waiting sequences.
        step_cost: time of the model's steps; required if `kv_cache_disk` is set.
        prompt_cost: cost of prompt tokens by position.

    Returns:
        The disk store; None if `kv_cache_disk` is not set.

    Raises:
        UsageError: the engine has no prefix cache.
    """
    if config.kv_cache_disk is None:
        return None
    shared_block_size("kv_cache_disk", config, scheduler)
    memory = executor.place_memory
    folder = Path(config.kv_cache_dir) if config.kv_cache_dir else env.cache_folder() / "kv"
    identity = identity_of(engine.manifest.content_hash, executor.isa, engine.plan.caches)
    store = DiskStore(folder, identity, config.kv_cache_disk, [group.place_bytes for group in memory])
    assert step_cost is not None
    scheduler.keep_on_disk(store, partial(_prompt_s, step_cost, prompt_cost))
    return store


def shared_block_size(option: str, config: RuntimeConfig, scheduler: Scheduler) -> int:
    """Number of tokens of a block that sequences can share. Raises UsageError if they share no blocks."""
    if scheduler.shared_block_size is None:
        why = "sequences of this engine share no blocks" if config.enable_prefix_caching else "nothing is kept"
        raise UsageError(f"{option} goes with a prefix cache", why, "Leave it out, or enable_prefix_caching.")
    return scheduler.shared_block_size


def _prompt_s(step_cost: StepCost, prompt_cost: PromptCost, first: int, end: int) -> float | None:
    """Seconds to compute the positions from `first` up to `end` of a prompt; None if no step was measured yet."""
    if not step_cost.is_measured:
        return None
    return step_cost.of_token * prompt_cost.of(np.arange(first, end, dtype=np.int32))
