"""Values that `--gate` accepts and refuses, and measurements that pass a limit."""

import pytest

from enginewright.builder.gate.config import MEASURES, GateConfig, limits_of, parse_gate
from enginewright.errors import UsageError
from enginewright.passes.quant import METHODS
from enginewright.quant_methods import AUTO, QUANT_METHODS
from enginewright.runtime.commands.quality import Check


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("quick", GateConfig()),
        ("full", GateConfig(full=True)),
        ("off", None),
        ("kl=0.05,top1=0.97", GateConfig(limits={"kl": 0.05, "top1": 0.97})),
        ("Full, KL = 5e-2, json=1", GateConfig(full=True, limits={"kl": 0.05, "json": 1.0})),
        ("divergence=12,full", GateConfig(full=True, limits={"divergence": 12.0})),
    ],
)
def test_levels_and_limits(text: str, expected: GateConfig | None) -> None:
    assert parse_gate(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quik", "did you mean quick"),
        ("", "there are quick, full, off"),
        ("quick,", "there are quick, full, off"),
        ("=0.05", "has no limit ''"),
        ("kl", "did you mean kl"),
        ("kll=0.05", "did you mean kl"),
        ("top2=0.9", "did you mean top1"),
        ("quick,full", "did you mean full"),
        ("kl=0.05,kl=0.06", "sets kl twice"),
        ("kl=", "from 0 up"),
        ("kl=small", "from 0 up"),
        ("kl=-1", "from 0 up"),
        ("kl=nan", "from 0 up"),
        ("kl=inf", "from 0 up"),
        ("top1=97", "from 0 to 1"),
        ("top1=97%", "from 0 to 1"),
        ("json=0.9", "Use --gate full,json=0.9"),
        ("off,kl=0.05", "measures nothing"),
    ],
)
def test_anything_else_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_gate(text)
    assert words in str(refused.value)


def test_every_method_has_one_entry() -> None:
    assert tuple(method.info.name for method in METHODS) == tuple(QUANT_METHODS)
    names = {measure.name for measure in MEASURES if not measure.full and measure.name != "cosine"}  # of vectors
    for info in QUANT_METHODS.values():
        assert info.limits.keys() == names and (info.min_cosine is None) == (info is AUTO)
        assert set(info.fallbacks) <= QUANT_METHODS.keys() - {info.name}


def test_mixed_engines_have_the_loosest_limits_of_their_formats() -> None:
    alone, mixed = limits_of(["int4-rtn"]), limits_of(["bf16", "int4-rtn", "bf16"])
    assert (
        mixed == alone
        and mixed["kl"] == QUANT_METHODS["int4-rtn"].limits["kl"]
        and mixed["top1"] == QUANT_METHODS["int4-rtn"].limits["top1"]
    )
    assert limits_of(["bf16"])["kl"] == QUANT_METHODS["bf16"].limits["kl"]


def test_given_limits_stand_in_place_of_the_formats() -> None:
    config = GateConfig(limits={"kl": 0.5})
    checks = {check.name: check for check in config.checks({"kl": 0.4, "top1": 0.9}, {"kl": 0.1, "top1": 0.95})}
    assert checks["kl"].limit == 0.5 and checks["kl"].passed
    assert checks["top1"].limit == 0.95 and not checks["top1"].passed
    assert len(checks) == 2, "what was not measured is not judged"


@pytest.mark.parametrize(
    ("value", "limit", "is_minimum", "passed"),
    [
        (0.1, 0.1, False, True),
        (0.11, 0.1, False, False),
        (0.1, 0.1, True, True),
        (0.09, 0.1, True, False),
        (None, 0.1, False, False),
        (None, 0.1, True, False),
        (7.0, None, True, True),
    ],
)
def test_a_limit_itself_passes_and_no_number_does_not(
    value: float | None, limit: float | None, is_minimum: bool, passed: bool
) -> None:
    assert Check("x", "x", value, limit, is_minimum).passed is passed
