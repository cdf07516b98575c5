"""Keys that families excuse, each at two odd values: the graph in onnxruntime is transformers with that value."""

from typing import Any

import numpy as np
import pytest

from enginewright.builder.harmless_keys import HARMLESS
from enginewright.builder.models import build_graph
from tests import tolerances
from tests.checkpoint import test_config_keys, test_hybrids, test_models
from tests.checkpoint.test_config_keys import NOT_TAKEN, content_with
from tests.checkpoint.test_models import graph_logits
from tests.helpers.breadth import others, repeated
from tests.helpers.harmless_keys import Reference, excused, excused_by
from tests.helpers.tiny import ENCODERS, FAMILIES, HYBRIDS, OF_EACH_BLOCK, MemoryCheckpoint

CASES: list[tuple[str, dict[str, Any], str]] = [
    *(
        (family, overrides, "HARMLESS")
        for family, overrides in (*test_models.CASES, *test_hybrids.CASES)
        if excused_by(family)
    ),
    # What is excused under a condition alone.
    ("granitemoehybrid", {"num_local_experts": 0}, "WITHOUT_EXPERTS"),
    ("granitemoehybrid", {}, "WITHOUT_ROPE"),
    ("nemotron_h", {}, "EXPERTS"),
    ("nemotron_h", {"hybrid_override_pattern": "M-*M-"}, "WITHOUT_EXPERTS"),
]


@pytest.mark.parametrize(
    ("family", "overrides", "table"), CASES, ids=[f"{family}-{list(o)}-{table}" for family, o, table in CASES]
)
def test_a_harmless_key_by_itself(family: str, overrides: dict[str, Any], table: str) -> None:
    reference, entries = Reference(family, overrides), excused_by(family, table)
    entries = {key: entry for key, entry in entries.items() if key not in overrides}
    if overrides.get("num_local_experts") == 0:
        entries.pop("output_router_logits", None)  # transformers' own loss of routers fails without one
    unchanged = content_with(reference, reference.config)
    logits = graph_logits(build_graph(MemoryCheckpoint.of(reference.model, reference.config)), reference.tokens)
    for key, entry in entries.items():
        for which in (0, 1):
            odd = reference.with_odd({key: entry}, which)
            assert odd.taken.keys() == {key}, f"{key}: transformers takes none of the odd values"
            assert content_with(reference, odd.config) == unchanged, odd.taken
            assert np.abs(odd.numbers - logits).max() < tolerances.HYBRID_LOGITS, odd.taken


test_any_one_unknown_key_is_refused_by_name = repeated(
    test_config_keys.test_any_one_unknown_key_is_refused_by_name,
    ("family", "start"),
    others(test_config_keys.UNKNOWN, test_config_keys.SOME_UNKNOWN),
)
test_harmless_keys_change_nothing = repeated(
    test_config_keys.test_harmless_keys_change_nothing, "family", others(FAMILIES, OF_EACH_BLOCK)
)
test_published_models_can_be_built = repeated(
    test_config_keys.test_published_models_can_be_built,
    "name",
    others(test_config_keys.PUBLISHED, test_config_keys.SOME_PUBLISHED),
)
test_what_transformers_saves_can_be_built = repeated(
    test_config_keys.test_what_transformers_saves_can_be_built,
    "family",
    others(test_config_keys.SAVED, test_config_keys.SOME_SAVED),
)


@pytest.mark.parametrize("family", others(FAMILIES, ["llama"]))
def test_each_value_of_the_keys_of_all_families(family: str) -> None:
    own = test_config_keys.harmless_of(family)
    test_config_keys.check_values(family, {key: entry for key, entry in HARMLESS.items() if key not in own})


test_odd_values_of_harmless_keys_change_nothing_in_transformers = repeated(
    test_config_keys.test_odd_values_of_harmless_keys_change_nothing_in_transformers,
    "family",
    others([*FAMILIES, *HYBRIDS, *ENCODERS], test_config_keys.SOME_FAMILIES),
)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *ENCODERS])
def test_other_odd_values_of_all_harmless_keys_at_once(family: str) -> None:
    """tests/checkpoint/test_config_keys.py has the first ones."""
    reference, entries = Reference(family, {}), excused(family)
    odd = reference.with_odd(entries, which=1)
    not_together = {"rope_parameters", "rope_scaling"}  # of which one says what the other does
    assert entries.keys() - odd.taken.keys() <= NOT_TAKEN | not_together
    assert np.abs(odd.numbers - reference.numbers()).max() < tolerances.DENSE_LOGITS
    assert content_with(reference, odd.config) == content_with(reference, reference.config)
