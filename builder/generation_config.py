"""Checks generation_config.json during the build: an error in it would otherwise fail each request."""

from collections.abc import Mapping
from typing import Any

import msgspec

from enginewright.errors import EngineError
from enginewright.runtime.text.generation_config import find_fault


def check_generation_config(config: Mapping[str, Any], vocab_size: int) -> None:
    """Checks that the runtime can use a config, and that a file can hold it.

    Args:
        config: content of generation_config.json.
        vocab_size: tokens of the vocabulary.

    Raises:
        EngineError: it cannot be used; the message names the key.
    """
    fault = find_fault(config, vocab_size)
    if fault is None:
        try:
            msgspec.json.encode(dict(config))
        except (ValueError, OverflowError, RecursionError) as error:  # such as half of a surrogate pair
            fault = str(error)
    if fault is not None:
        raise EngineError(
            "generation_config.json cannot be used",
            fault,
            "Correct the key in the file, or take it out; then build again.",
        )
