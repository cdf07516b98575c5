"""Checks the keys of generation_config.json that the runtime uses.

As in transformers, null counts as a missing key; 0 turns a setting off, as in published configs.
"""

from collections.abc import Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.sampling.parameters import SamplingParams

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def find_fault(config: Mapping[str, Any], vocab_size: int) -> str | None:
    """Description of the first key that is not valid, with its name; None if all are valid."""
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        return f"do_sample must be true or false, not {_short(do_sample)}"
    for key in SAMPLING_KEYS:
        value = config.get(key)
        if value is None or (type(value) in (int, float) and value == 0):
            continue
        try:
            SamplingParams(**{key: value})
        except UsageError as error:
            return error.what[:200]
    listed = config.get("eos_token_id")
    for token in listed if isinstance(listed, list) else [listed]:
        if token is None and not isinstance(listed, list):
            break
        if type(token) is not int:
            return f"eos_token_id must be a token id or a list of some, not {_short(listed)}"
        if not 0 <= token < vocab_size:
            return f"eos_token_id names token {_short(token)}, and the model has {vocab_size}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
