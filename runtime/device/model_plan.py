"""The plan that an executor runs: the engine's, with adapters where a config has them."""

from enginewright.adapter_plan import with_adapters
from enginewright.errors import UsageError
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.engine import Engine
from enginewright.targets import CPU


def model_plan(engine: Engine, config: RuntimeConfig) -> Plan:
    """Returns the plan of an engine's own model.

    Args:
        engine: the open engine.
        config: limits; `enable_lora` extends the plan.

    Raises:
        UsageError: the engine cannot have adapters, or not on this device.
    """
    if not config.enable_lora:
        return engine.plan
    if engine.target != CPU:
        raise UsageError("enable_lora is not possible on a GPU", "adapters are served on CPUs so far")
    return with_adapters(engine.plan, engine.adapter_sites.sites, config.max_lora_rank)
