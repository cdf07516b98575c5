"""The config reader: kinds, defaults, names that differ, and refusal of what nobody read."""

import math
from typing import Any

import pytest

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.errors import EngineError, UnsupportedModelError


def test_reads_by_kind() -> None:
    config = ConfigReader({"layers": 3, "epsilon": 1, "tied": False, "name": "x", "kinds": ["a", "b"]})
    assert config.read(int, "layers") == 3
    epsilon = config.read(float, "epsilon")
    assert (epsilon, type(epsilon)) == (1.0, float)
    assert config.read(bool, "tied", default=True) is False
    assert config.read(str, "name") == "x"
    assert config.read_list(str, "kinds") == ["a", "b"]
    assert config.read_list(str, "others") is None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "3"),
        (int, 3.0),
        (int, True),
        (float, False),
        (float, "1"),
        (float, math.inf),
        (float, math.nan),
        (bool, 1),
        (bool, "true"),
        (str, 3),
        (str, ["x"]),
    ],
)
def test_a_value_of_another_kind_is_named(kind: type[object], value: object) -> None:
    with pytest.raises(EngineError, match="key is ") as error:
        ConfigReader({"key": value}).read(kind, "key")
    assert error.value.exit_code == 1


@pytest.mark.parametrize("values", [{}, {"hidden_size": None}])
def test_missing_and_null_are_the_same(values: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"config\.json cannot be used: hidden_size is missing"):
        ConfigReader(values).read(int, "hidden_size")
    assert ConfigReader(values).read(int, "hidden_size", default=7) == 7
    assert ConfigReader(values).read(int, "hidden_size", default=None) is None


@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_above_zero(value: int) -> None:
    with pytest.raises(EngineError, match="not above 0"):
        ConfigReader({"heads": value}).read_size("heads")
    with pytest.raises(EngineError, match="not above 0"):
        ConfigReader({"epsilon": value}).read_positive("epsilon")


def test_other_names_of_a_key() -> None:
    assert ConfigReader({"type": "yarn"}).read(str, "rope_type", "type") == "yarn"
    assert ConfigReader({"rope_type": "yarn", "type": "yarn"}).read(str, "rope_type", "type") == "yarn"
    with pytest.raises(EngineError, match="rope_type is 'default', but type is 'mrope'"):
        ConfigReader({"rope_type": "default", "type": "mrope"}).read(str, "rope_type", "type")


def test_sections() -> None:
    section = ConfigReader({"rope_scaling": {"factor": "2"}}).section("rope_scaling")
    assert section is not None
    with pytest.raises(EngineError, match=r"config\.json: rope_scaling cannot be used: factor is '2'"):
        section.read(float, "factor")
    assert ConfigReader({"rope_scaling": None}).section("rope_scaling") is None
    with pytest.raises(EngineError, match="not an object"):
        ConfigReader({"rope_scaling": [1]}).section("rope_scaling")
    with pytest.raises(EngineError, match=r"kinds\[1\] is 2"):
        ConfigReader({"kinds": ["a", 2]}).read_list(str, "kinds")
    with pytest.raises(EngineError, match="not a list"):
        ConfigReader({"kinds": "a"}).read_list(str, "kinds")


def test_every_key_is_read_or_harmless_or_refused() -> None:
    values = {"attention_bias": True, "use_cache": False, "own": 3, "absent": None}
    own = {"own": Harmless("It is a remark.", (3, 4))}
    with pytest.raises(UnsupportedModelError, match="not implemented: attention_bias = True, own = 3\n") as error:
        ConfigReader(values).refuse_unread()
    assert error.value.exit_code == 3
    config = ConfigReader(values)
    with pytest.raises(UnsupportedModelError, match="not implemented: attention_bias = True\n"):
        config.refuse_unread(own)
    config.read(bool, "attention_bias")
    config.refuse_unread(own)
    config = ConfigReader({**values, "attention_bias": None, "own": 5})
    with pytest.raises(UnsupportedModelError, match=r"not implemented: own = 5 \(only 3 or 4 can be built\)"):
        config.refuse_unread(own)


def test_objects_in_which_every_key_counts() -> None:
    config = ConfigReader({"factor": 2.0, "remark": True, "absent": None, "long": [1.0] * 1000})
    config.read(float, "factor")
    with pytest.raises(UnsupportedModelError) as error:
        config.refuse_any_unread(harmless=("remark",))
    assert "long = [1.0" in str(error.value)
    assert len(str(error.value)) < 200
