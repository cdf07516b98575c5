"""The open adapters of an engine."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from enginewright.adapter_file import PREPARE_AGAIN, AdapterFile
from enginewright.adapter_sites import Site
from enginewright.errors import CorruptEngineError, UsageError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.adapters import check_slot
from enginewright.runtime.engine import Engine


def check_adapter(adapter: AdapterFile, engine: Engine, config: RuntimeConfig) -> None:
    """Checks that sequences of an engine can have an adapter.

    Args:
        adapter: the adapter.
        engine: the engine.
        config: limits of the engine.

    Raises:
        UsageError: the engine was opened without adapters, or the adapter is another engine's or has a larger rank.
        CorruptEngineError: it changes what the engine does not have.
    """
    if not config.enable_lora:
        raise UsageError(
            f"the adapter {adapter.name} cannot be used", "the engine was opened without adapters", "Set enable_lora."
        )
    adapter.check_fits(engine.manifest)
    check_sites(adapter, engine.adapter_sites.sites)
    if adapter.max_rank > config.max_lora_rank:
        raise UsageError(
            f"the adapter {adapter.name} has rank {adapter.max_rank}",
            f"max_lora_rank is {config.max_lora_rank}",
            f"Use --max-lora-rank {adapter.max_rank}.",
        )


def check_sites(adapter: AdapterFile, sites: Sequence[Site]) -> None:
    """Checks that an engine has the sites that an adapter changes.

    Args:
        adapter: the adapter.
        sites: the engine's sites.

    Raises:
        CorruptEngineError: it has not, or they have other matrices.
    """
    known = {site.key: site for site in sites}
    for key, change in adapter.sites.items():
        site, matrices = known.get(key), change.matrices
        fits = site is not None and (change.rows, change.columns) == (site.rows, site.columns)
        if fits and site is not None:
            experts = matrices if not change.shared else ()
            heads = len(matrices) if change.shared else 0
            fits = heads == site.heads and bool(experts) == (site.experts > 0)
            fits = fits and (not experts or experts[-1] < site.experts)
            fits = fits and change.table == (site.kind == "table")
        if not fits:
            raise CorruptEngineError(
                "the adapter cannot be used", f"the engine has no adapter site {key} of its form", PREPARE_AGAIN
            )


class Adapters:
    """The open adapters of an engine, by their files. `get` may be called in any thread.

    The least recently used one is dropped for another one, and its memory is freed once no request uses it. A request
    that has begun keeps its adapter, also if its file is replaced by another meanwhile.

    Args:
        engine: the engine.
        config: limits of the engine.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._engine, self._config = engine, config
        # path → identity of the file and the adapter, the least recently used first
        self._open: OrderedDict[Path, tuple[tuple[int, ...], AdapterFile]] = OrderedDict()
        self._lock = Lock()

    def get(self, path: Path) -> AdapterFile:
        """Returns the adapter of a file, which is opened and checked if it is not open.

        Args:
            path: the adapter file.

        Raises:
            UsageError: there is no such file, or the adapter does not fit the engine or its limits.
            EngineError: the file cannot be read.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise UsageError(f"there is no adapter {path}", error.strerror or str(error)) from error
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        with self._lock:
            known = self._open.get(path)
            if known is not None and known[0] == identity:
                self._open.move_to_end(path)
                return known[1]
        with AdapterFile.open(path) as adapter:  # its matrices stay in memory
            check_adapter(adapter, self._engine, self._config)
            check_slot(adapter, self._engine, self._config)
        with self._lock:
            self._open[path] = identity, adapter
            self._open.move_to_end(path)
            if len(self._open) > self._config.max_cpu_loras:
                self._open.popitem(last=False)
        return adapter
