"""Opens the KV events and the stores of an engine's prefix cache."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from enginewright.errors import UsageError
from enginewright.runtime import env
from enginewright.runtime.cache.channel import Facts, read_secret, release_hash
from enginewright.runtime.cache.disk import DiskStore
from enginewright.runtime.cache.peer import MemoryBlobs, PeerBlobs, PeerServer
from enginewright.runtime.cache.remote import CAUSES, SEAL_BYTES, Blobs, EntryCipher, RemoteStore
from enginewright.runtime.cache.s3 import Credentials, S3Blobs, S3Location
from enginewright.runtime.cache.store import identity_of
from enginewright.runtime.config import TCP, RuntimeConfig, split_address
from enginewright.runtime.core.kv_events import KvEventSender
from enginewright.runtime.core.stats import DiskStats, RemoteStats
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


class Stores:
    """The stores of an engine's prefix cache outside its memory: the disk, and what servers share.

    Args:
        engine: the engine.
        config: limits, with `kv_cache_disk`, and `kv_cache_remote` or `kv_cache_share`.
        executor: runs the model, and reads and writes its KV blocks.
        scheduler: saves blocks, and reads them for waiting sequences.
        seconds: gives the seconds to compute the tokens from one position up to another; None: not known yet.

    Raises:
        UsageError: the engine has no prefix cache, or a store cannot be opened as it is configured.
        EngineError: a package is not installed.
    """

    def __init__(
        self,
        engine: Engine,
        config: RuntimeConfig,
        executor: Executor,
        scheduler: Scheduler,
        seconds: Callable[[int, int], float | None],
    ) -> None:
        self._disk: DiskStore | None = None
        self._remote: RemoteStore | None = None
        self._shared: MemoryBlobs | None = None
        self._server: PeerServer | None = None
        sizes = [group.place_bytes for group in executor.place_memory]
        identity = identity_of(engine.manifest.content_hash, executor.isa, engine.plan.caches)
        try:
            if config.kv_cache_disk is not None:
                shared_block_size("kv_cache_disk", config, scheduler)
                folder = Path(config.kv_cache_dir) if config.kv_cache_dir else env.cache_folder() / "kv"
                self._disk = DiskStore(folder, identity, config.kv_cache_disk, sizes)
            if config.shares_kv_cache:
                block_size = shared_block_size("kv_cache_remote", config, scheduler)
                secret, facts = kv_secret(config), block_facts(engine, executor, block_size)
                cipher = EntryCipher(secret, identity)  # before what has to be closed, since it may fail
                blobs = self._open_blobs(config, identity, secret, facts, max(sizes) + SEAL_BYTES)
                self._remote = RemoteStore(blobs, cipher, sizes)
        except BaseException:
            self.close()
            raise
        scheduler.keep_in([store for store in (self._disk, self._remote) if store is not None], seconds)

    def disk_stats(self) -> DiskStats | None:
        """Statistics of the disk; None: nothing is kept there."""
        return None if self._disk is None else DiskStats(self._disk.num_bytes, self._disk.num_failures)

    def remote_stats(self) -> RemoteStats | None:
        """Statistics of what servers share; None: nothing is shared."""
        if self._remote is None:
            return None
        return RemoteStats(
            num_sent_bytes=self._remote.num_sent_bytes,
            num_received_bytes=self._remote.num_received_bytes,
            num_searches=self._remote.num_searches,
            num_found=self._remote.num_found,
            failures={cause: self._remote.failures[cause] for cause in CAUSES},
            shared_bytes=0 if self._shared is None else self._shared.num_bytes,
        )

    def close(self) -> None:
        """Writes what is queued, and ends connections and threads."""
        for store in (self._disk, self._remote):
            if store is not None:
                store.close()
        if self._server is not None:
            self._server.close()

    def _open_blobs(self, config: RuntimeConfig, identity: str, secret: bytes, facts: Facts, max_bytes: int) -> Blobs:
        """Opens the place where servers share entries: this server's memory, a peer's, or a bucket."""
        if config.kv_cache_share is not None:
            assert config.kv_cache_listen is not None, "RuntimeConfig requires it"
            self._shared = MemoryBlobs(config.kv_cache_share)
            self._server = PeerServer(*split_address(config.kv_cache_listen), secret, facts, self._shared, max_bytes)
            return self._shared
        url = config.kv_cache_remote or ""
        if url.startswith(TCP):
            return PeerBlobs(*split_address(url.removeprefix(TCP)), secret, facts, max_bytes)
        return S3Blobs(S3Location.of_url(url), identity, Credentials.of_environment(), max_bytes)


def shared_block_size(option: str, config: RuntimeConfig, scheduler: Scheduler) -> int:
    """Number of tokens of a block that sequences can share. Raises UsageError if they share no blocks."""
    if scheduler.shared_block_size is None:
        why = "sequences of this engine share no blocks" if config.enable_prefix_caching else "nothing is kept"
        raise UsageError(f"{option} goes with a prefix cache", why, "Leave it out, or enable_prefix_caching.")
    return scheduler.shared_block_size


def kv_secret(config: RuntimeConfig) -> bytes:
    """Reads the secret that servers share.

    Raises:
        UsageError: the file cannot be read, or is too short.
    """
    assert config.kv_secret_file is not None, "RuntimeConfig requires it"
    return read_secret("kv_secret_file", config.kv_secret_file)


def block_facts(engine: Engine, executor: Executor, block_size: int) -> Facts:
    """All that the bytes of a block depend on, by the names under which servers refuse each other.

    Args:
        engine: the engine.
        executor: runs it.
        block_size: number of tokens of a block.
    """
    dtypes = sorted({plane.dtype for group in engine.plan.caches for plane in getattr(group, "planes", ())})
    return {
        "content hash": engine.manifest.content_hash,
        "KV dtype": " ".join(dtypes),
        "block size": str(block_size),
        "KV layout": sha256(msgspec.json.encode(engine.plan.caches)).hexdigest(),
        "instruction set": executor.isa,
        "release": release_hash(),
    }


def prompt_s(step_cost: StepCost, prompt_cost: PromptCost, first: int, end: int) -> float | None:
    """Seconds to compute the positions from `first` up to `end` of a prompt; None if no step was measured yet.

    Args:
        step_cost: time of the model's steps.
        prompt_cost: cost of prompt tokens by position.
        first: the first position.
        end: the position after the last.
    """
    if not step_cost.is_measured:
        return None
    return step_cost.of_token * prompt_cost.of(np.arange(first, end, dtype=np.int32))
