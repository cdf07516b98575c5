"""Adapters of ranks: rank 0 sends all bytes of one to the others, which keep their parts of it.

So another machine needs no file of an adapter, and all ranks have the same one, whatever happens to its file. Messages
about adapters come in order with the steps.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from enginewright.adapter_file import AdapterFile, SiteAdapter
from enginewright.errors import CorruptEngineError, NotEnoughMemoryError
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.ranks.messages import (
    AdapterData,
    AdapterOrder,
    LoadAdapter,
    Settings,
    UnloadAdapter,
)

DATA_BYTES = 4 << 20  # maximum bytes of an adapter in a message, so that pings have their turn


def adapter_limits(settings: Settings) -> dict[str, Any]:
    """Limits of RuntimeConfig about adapters.

    Args:
        settings: settings of the group.
    """
    if not settings.max_loras:
        return {}
    return {"enable_lora": True, "max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}


def messages_of(slot: int, adapter: AdapterFile) -> Iterator[msgspec.Struct]:
    """Makes the messages by which other ranks load an adapter.

    Args:
        slot: the slot.
        adapter: the adapter, which fits the engine.
    """
    for site in adapter.sites.values():
        for section in site.sections():
            content = section.cast("B")
            for begin in range(0, len(content), DATA_BYTES):
                end = begin + DATA_BYTES
                yield AdapterData(content[begin:end], end >= len(content))
    yield LoadAdapter(slot, adapter.name, adapter.entries.sites)


class AdapterReceiver:
    """Loads the adapters that rank 0 sends, or this rank's parts of them.

    Args:
        executor: the executor of this rank.
    """

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor = executor
        self._content = bytearray()  # the section that is coming
        self._sections: list[memoryview] = []  # those before it, of one adapter

    def follow(self, order: AdapterOrder) -> None:
        """Does what a message about adapters says.

        Raises:
            CorruptEngineError: an adapter is not what its entries say.
            NotEnoughMemoryError: the part of an adapter does not fit into memory.
        """
        match order:
            case AdapterData():
                self._content += order.content
                if order.is_last:
                    self._sections.append(memoryview(self._content))
                    self._content = bytearray()
            case LoadAdapter():
                sections, self._sections = self._sections, []
                self._load(order, sections)
            case UnloadAdapter():
                self._executor.unload_adapter(order.slot)

    def _load(self, order: LoadAdapter, sections: list[memoryview]) -> None:
        what, sites = f"the adapter {order.name} cannot be loaded", dict[str, SiteAdapter]()
        try:
            for entry in order.sites:
                count = len(entry.forms())
                own, sections = sections[:count], sections[count:]
                if len(own) < count:
                    raise ValueError(f"sections of {entry.key} have not come")
                sites[entry.key] = SiteAdapter.of(entry, own)
            self._executor.load_sites(order.slot, sites)
        except ValueError as error:
            raise CorruptEngineError(what, str(error), "Prepare it again with `engine adapter`.") from error
        except MemoryError as error:
            raise NotEnoughMemoryError(what, "this rank has not enough memory for it") from error
