"""Every family and method on several ranks, at sizes that divide into nothing."""

from pathlib import Path

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.quant_methods import QUANT_METHODS
from enginewright.runtime.engine import Engine
from tests.helpers.adapters import prepared, trained
from tests.helpers.tiny import FAMILIES, HYBRIDS, MemoryCheckpoint, tiny_config, tiny_model
from tests.long.test_adapters import EXPERTS, PARAMETERS
from tests.ranks import test_adapters
from tests.ranks.test_bits import CUT, built, check


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_families(family: str, tmp_path: Path) -> None:
    path = built(tmp_path / "tiny.engine", family, {})
    check(path, 2, 4)
    check(path, 1, 2, stages=2)
    check(path, 1, stages=4)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_adapters_of_families(family: str, tmp_path: Path) -> None:
    """One adapter has every layer that can have adapters, and the other one lengths (DoRA) of the plain layers."""
    model, engine = tiny_model(config := tiny_config(family)), tmp_path / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), engine)
    with Engine.open(engine) as opened:
        sites = [site for site in opened.adapter_sites.sites if not site.experts]
    every = sorted({run.module for site in sites for run in site.runs})
    plain = sorted({run.module for site in sites if site.kind == "linear" and not site.heads for run in site.runs})
    of_experts = {"target_parameters": PARAMETERS} if family in EXPERTS else {}
    of_family = {"fan_in_fan_out": True} if family == "gpt2" else {}
    choices = {"target_modules": every, **of_experts}, {"target_modules": plain[::2], "use_dora": True, "r": 19}
    files = []
    for number, choice in enumerate(choices):
        trained(model, tmp_path / str(number), seed=number, **choice, **of_family)
        files.append(prepared(engine, tmp_path / str(number)))
    test_adapters.check(engine, files, 2, 4)
    test_adapters.check(engine, files, 1, 2, stages=2)
    test_adapters.check(engine, files, 1, stages=4)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("method", ["w8a8", "int4-rtn"])
def test_blocks_of_codes(name: str, method: str, tmp_path: Path) -> None:
    family, changes, _ = CUT[name]
    check(built(tmp_path / "tiny.engine", family, changes, method), 2, 4)


@pytest.mark.parametrize("method", [method for method in QUANT_METHODS if method != "auto"])
def test_methods(method: str, tmp_path: Path) -> None:
    family, changes, _ = CUT["norms of heads"]
    check(built(tmp_path / "tiny.engine", family, changes, method), 2, 4)
