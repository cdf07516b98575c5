"""Settings are read from texts, and wrong ones are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright.ray.settings import Settings
from enginewright.runtime.config import RuntimeConfig
from tests.helpers.serving import tiny_engine


def test_values_of_a_command_line() -> None:
    file = str(tiny_engine())
    texts = {"engines": file, "replicas": "2", "max_replicas": "4", "cpus": "3", "drain_seconds": "7.5"}
    found = Settings.of({**texts, "memory": "2g", "strict_keys": "true", "kv_cache_memory": "64m", "max_num_seqs": "8"})
    assert (found.engines, found.replicas, found.max_replicas, found.cpus) == ((file,), 2, 4, 3.0)
    assert (found.server.drain_seconds, found.server.memory, found.server.strict_keys) == (7.5, 2 << 30, True)
    assert found.limits == {"kv_cache_memory": "64m", "max_num_seqs": "8", "threads": 3}
    assert found.max_ongoing == 16


def test_values_of_a_config_file() -> None:
    file = str(tiny_engine())
    found = Settings.of({"engines": [file, str(tiny_engine("calls tools"))], "api_keys": ["a", "b"], "mmap": False})
    assert len(found.engines) == 2 and found.server.api_keys == ("a", "b") and found.limits["mmap"] is False
    assert found.max_ongoing == 2 * RuntimeConfig.max_num_seqs and not found.server.page


def test_several_texts_are_separated_by_commas() -> None:
    assert Settings.of({"engines": str(tiny_engine()), "api_keys": "a, b"}).server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("engines", "", "engines is missing"),
        ("engines", 7, "it must be a text"),
        ("replicas", "0", "replicas is 0"),
        ("replicas", "many", "replicas is 'many'"),
        ("max_replicas", 1, "replicas is 2"),
        ("target", 0, "target is 0"),
        ("cpus", "nan", "cpus is nan"),
        ("gpus", -1, "gpus is -1"),
        ("max_lead", -1, "max_lead is -1"),
        ("port", 80, "no setting called port"),
        ("drain_secs", 80, "no setting called drain_secs"),
        ("drain_seconds", -1, "drain_seconds is -1"),
        ("memory", "much", "'much' is not a size"),
        ("max_num_seqs", "0", "max_num_seqs"),
        ("enable_prefix_caching", "perhaps", "enable_prefix_caching is 'perhaps'"),
    ],
)
def test_wrong_values(name: str, value: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        Settings.of({"engines": str(tiny_engine()), "replicas": 2, name: value})
