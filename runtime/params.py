"""A model's own sampling defaults."""

from typing import Any

from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling import SamplingParams

SAMPLED_BY = ("top_k", "top_p", "min_p", "seed")  # naming one of these asks for sampling


def default_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own sampling defaults (generation_config.json), overridden by what is given and not None."""
    given = {name: value for name, value in given.items() if value is not None}
    config = engine.generation_config
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
    if config.get("do_sample") or given.get("temperature") or any(name in given for name in SAMPLED_BY):
        defaults["temperature"] = config.get("temperature") or 1.0
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
    if config.get("repetition_penalty") is not None:
        defaults["repetition_penalty"] = config["repetition_penalty"]
    return SamplingParams(**defaults | given)
