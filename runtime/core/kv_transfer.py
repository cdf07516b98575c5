"""Prefill and decode apart: a prompt's KV blocks move from the server that computes them to the one that answers."""

from concurrent.futures import Future

from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.leases import LeaseFetcher, LeaseServer, RemotePrefix
from enginewright.runtime.cache.store import ReadEntries
from enginewright.runtime.config import RuntimeConfig, split_address
from enginewright.runtime.core.stats import KvTransferStats
from enginewright.runtime.core.storage import block_facts, kv_secret, shared_block_size
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.sequence import TokenSequence

DEFAULT_LISTEN = "127.0.0.1:0"


class KvTransfer:
    """Leases prompts' blocks to other servers, fetches theirs, or both.

    Args:
        engine: the engine.
        config: limits, with `kv_role`, `kv_listen` and `kv_secret_file`.
        executor: runs the model.
        scheduler: has the prefix cache.

    Raises:
        UsageError: the engine has no prefix cache, the secret cannot be read, or the address is not available.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig, executor: Executor, scheduler: Scheduler) -> None:
        self._scheduler, self._block_size = scheduler, shared_block_size("kv_role", config, scheduler)
        self._place_bytes = [group.place_bytes for group in executor.place_memory]
        self._secret, facts = kv_secret(config), block_facts(engine, executor, self._block_size)
        self._leases: LeaseServer | None = None
        self._fetcher: LeaseFetcher | None = None
        if config.kv_role in ("decode", "both"):
            self._fetcher = LeaseFetcher(self._secret, facts, self._place_bytes)  # without threads at first
        if config.kv_role in ("prefill", "both"):
            self._leases = LeaseServer(*split_address(config.kv_listen or DEFAULT_LISTEN), self._secret, facts)

    @property
    def leases_prompts(self) -> bool:
        """True if other servers may fetch prompts from this one."""
        return self._leases is not None

    @property
    def fetches_prompts(self) -> bool:
        """True if this server fetches prompts of others."""
        return self._fetcher is not None

    def hold(self, sequence: TokenSequence) -> dict[str, object] | None:
        """Leases the blocks of a prompt whose sequence has just ended.

        Returns:
            The `kv_transfer_params` with which another server fetches them; None if there is no full block.
        """
        entries = self._scheduler.read_prompt(sequence)
        if self._leases is None or not entries:
            return None
        num_bytes = sum(self._place_bytes[group] for group, _ in entries)
        return self._leases.hold(entries, num_bytes).to_params(self._secret)

    def fetch(self, prompt: list[int], cache_salt: str, params: dict[str, object]) -> "Future[ReadEntries]":
        """Begins to fetch the blocks of a prompt, without those that are in memory already.

        Args:
            prompt: the token ids.
            cache_salt: as in the request.
            params: `kv_transfer_params` of the answer of the server that has computed them.

        Raises:
            UsageError: the parameters are not signed with this server's secret.
        """
        assert self._fetcher is not None, "the caller has looked at fetches_prompts"
        remote = RemotePrefix.of_params(params, self._secret)
        keys = PrefixKeys(self._block_size, cache_salt).of(prompt, (len(prompt) - 1) // self._block_size)
        entries = {(group, key) for key in keys for group in range(len(self._place_bytes))}
        return self._fetcher.fetch(remote, set(filter(self._scheduler.is_in_memory, entries)))

    def stats(self) -> KvTransferStats:
        """Totals since the start."""
        leases, fetcher = self._leases, self._fetcher
        return KvTransferStats(
            num_sent_bytes=0 if leases is None else leases.num_sent_bytes,
            num_received_bytes=0 if fetcher is None else fetcher.num_received_bytes,
            num_failures=0 if fetcher is None else fetcher.num_failures,
            num_expired=0 if leases is None else leases.num_expired,
            leased_bytes=0 if leases is None else leases.num_bytes,
        )

    def close(self) -> None:
        """Ends all leases, connections and threads."""
        if self._leases is not None:
            self._leases.close()
        if self._fetcher is not None:
            self._fetcher.close()
