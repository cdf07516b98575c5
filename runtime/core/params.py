"""A model's own sampling defaults."""

from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SAMPLED_BY = ("top_k", "top_p", "min_p", "seed")  # naming one of these asks for sampling


def params_of(given: SamplingParams | None, engine: Engine) -> SamplingParams:
    """What a request is given, or the model's own where that is None. Raises UsageError for anything else."""
    if given is None:
        return default_params(engine)
    if not isinstance(given, SamplingParams):
        raise UsageError(f"sampling_params is {shorten(given)}", "it must be a SamplingParams")
    return given


def default_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own sampling defaults (generation_config.json), overridden by what is given and not None."""
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("use_beam_search"):  # it knows nothing of the model's defaults, which are of how to sample
        return SamplingParams(**{"temperature": 0.0, "max_tokens": None} | given)
    config = engine.generation_config
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
    if config.get("do_sample") or given.get("temperature") or any(name in given for name in SAMPLED_BY):
        defaults["temperature"] = config.get("temperature") or 1.0
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name)}  # 0 is off
    if config.get("repetition_penalty"):
        defaults["repetition_penalty"] = config["repetition_penalty"]
    return SamplingParams(**defaults | given)
