"""The adapter of a request, in vLLM's form."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.adapter_file import AdapterFile
from enginewright.errors import UsageError, shorten
from enginewright.runtime.core.engine_core import EngineCore


@dataclass(frozen=True)
class LoRARequest:
    """Names the adapter that an answer is computed with."""

    lora_name: str  # name of the adapter
    lora_int_id: int = 0  # number of the adapter in vLLM, of no use here
    lora_path: str = ""  # adapter file, as `engine adapter` makes it


Adapter = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or one for each


def adapters_of(given: Adapter, count: int, core: object) -> Sequence[AdapterFile | None]:
    """Opens the adapters of some prompts.

    Args:
        given: the adapter of all prompts, or one for each.
        count: number of prompts.
        core: core of the engine.

    Raises:
        UsageError: the number of adapters is another one, or an adapter does not fit the engine.
        EngineError: a file cannot be read.
    """
    if given is None:
        return [None] * count
    wanted: list[object] = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(wanted) != count:
        raise UsageError(f"lora_request has {len(wanted)} adapters", f"there are {count} prompts")
    return [None if one is None else _open(one, core) for one in wanted]


def _open(wanted: object, core: object) -> AdapterFile:
    if not isinstance(wanted, LoRARequest):
        raise UsageError(f"lora_request is {shorten(wanted)}", "it must be a LoRARequest")
    if not wanted.lora_path:
        raise UsageError(f"the adapter {wanted.lora_name} has no file", "lora_path is empty")
    if not isinstance(core, EngineCore):
        raise UsageError(f"the adapter {wanted.lora_name} cannot be used", "the engine generates no text")
    return core.open_adapter(Path(wanted.lora_path))
