"""Quantization methods: one file and one frozen config each, found by the names of enginewright/quant_methods.py."""

from dataclasses import fields
from importlib import import_module

from enginewright.errors import UsageError
from enginewright.passes.quant.bf16 import Bf16
from enginewright.passes.quant.fp8 import Fp8
from enginewright.passes.quant.int4_awq import Int4Awq
from enginewright.passes.quant.int4_gptq import Int4Gptq
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.int8_sq import Int8Sq
from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.passes.quant.method import QuantConfig
from enginewright.passes.quant.mxfp4 import Mxfp4
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.quant_methods import QUANT_METHODS, MethodInfo


def _method(info: MethodInfo) -> type[QuantConfig]:
    """Finds the class of an entry, in the file with the method's name."""
    module = import_module(f"{__name__}.{info.name.replace('-', '_')}")
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, QuantConfig)]
    (method,) = (one for one in classes if vars(one).get("info") is info)
    return method


METHODS = tuple(map(_method, QUANT_METHODS.values()))


def quant_config(name: str, **settings: object) -> QuantConfig:
    """Makes the config of a method from the command's options.

    Args:
        name: name in `--quant`.
        settings: settings of the method; those that are None keep their defaults.

    Raises:
        KeyError: there is no such method.
        UsageError: the method does not have a setting, or not with this value.
    """
    method = {method.info.name: method for method in METHODS}[name]
    given = {key: value for key, value in settings.items() if value is not None}
    for key in given:
        if key not in _settings(method):
            option = f"--{key.replace('_', '-')}"
            others = ", ".join(other.info.name for other in METHODS if key in _settings(other))
            raise UsageError(
                f"{option} means nothing to --quant {name}", f"it is a setting of {others}", "Leave it out."
            )
    return method(**given)


def _settings(method: type[QuantConfig]) -> list[str]:
    return [field.name for field in fields(method)]


__all__ = [
    "METHODS",
    "W8A8",
    "Bf16",
    "Fp8",
    "Int4Awq",
    "Int4Gptq",
    "Int4Rtn",
    "Int8Sq",
    "Int8Wo",
    "Mxfp4",
    "QuantConfig",
    "quant_config",
]
