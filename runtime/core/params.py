"""A model's own sampling defaults."""

from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SAMPLED_BY = ("top_k", "top_p", "min_p", "seed")  # giving one of these turns sampling on


def params_of(given: SamplingParams | None, engine: Engine) -> SamplingParams:
    """Chooses the sampling parameters of a request.

    Args:
        given: the parameters that the user gives; None: the model's own defaults.
        engine: the engine, which holds the defaults.

    Raises:
        UsageError: `given` is neither None nor a SamplingParams.
    """
    if given is None:
        return default_params(engine)
    if not isinstance(given, SamplingParams):
        raise UsageError(f"sampling_params is {shorten(given)}", "it must be a SamplingParams")
    return given


def default_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own sampling defaults (generation_config.json).

    Args:
        engine: the engine, which holds the defaults.
        given: parameters that replace the defaults; those that are None do not.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("use_beam_search"):  # the model's defaults are about sampling, which it does not do
        return SamplingParams(**{"temperature": 0.0, "max_tokens": None} | given)
    config = engine.generation_config
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
    if config.get("do_sample") or given.get("temperature") or any(name in given for name in SAMPLED_BY):
        defaults["temperature"] = config.get("temperature") or 1.0
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name)}  # 0 is off
    if config.get("repetition_penalty"):
        defaults["repetition_penalty"] = config["repetition_penalty"]
    return SamplingParams(**defaults | given)
