"""Checks generation_config.json in the build: what it gets wrong would otherwise fail each request."""

from collections.abc import Mapping
from typing import Any

import msgspec

from enginewright.errors import EngineError
from enginewright.runtime.text.generation_config import fault_of


def check_generation_config(config: Mapping[str, Any], vocab_size: int) -> None:
    """Raises EngineError, naming the key, where the runtime could not use the config or a file could not hold it."""
    fault = fault_of(config, vocab_size)
    if fault is None:
        try:
            msgspec.json.encode(dict(config))
        except (ValueError, OverflowError, RecursionError) as error:  # half of a surrogate pair, for one
            fault = str(error)
    if fault is not None:
        raise EngineError(
            "generation_config.json cannot be used",
            fault,
            "Correct the key in the file, or take it out; then build again.",
        )
