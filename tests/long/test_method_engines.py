"""Engines of every method against the graph that they were lowered from, in onnxruntime: of a real model, and of the
tiny ones that tests/build/test_method_engines.py leaves out.
"""

from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import METHODS, QuantConfig
from tests import tolerances
from tests.build import test_method_engines as short
from tests.build.test_method_engines import activations_of, difference
from tests.helpers.breadth import others, repeated

TOKENS = [1, 504, 3575, 282, 4649, 314, 7042, 30, 198, 339, 5248, 2520, 327, 253, 1194, 28, 284, 2744]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.info.name)
def test_an_engine_of_a_real_model_computes_its_graph(
    method: type[QuantConfig], smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = difference(open_checkpoint(str(smollm2_folder)), method(), TOKENS, tmp_path, monkeypatch)
    bounds = tolerances.ENGINE_GRAPH_SMOLLM2
    assert error < bounds.get(method.info.name, bounds[activations_of(method)])


def rest(cases: list[Any]) -> list[Any]:
    return others(cases, short.in_turn(cases))


test_an_engine_computes_its_graph = repeated(
    short.test_an_engine_computes_its_graph, ("method", "family"), rest(short.BY_METHOD), ids=short.name_of
)
test_so_it_does_with_static_scales = repeated(
    short.test_so_it_does_with_static_scales, ("group", "family"), rest(short.BY_GROUP)
)
test_so_it_does_with_other_scales_of_fp8 = repeated(
    short.test_so_it_does_with_other_scales_of_fp8, ("scales", "family"), rest(short.BY_SCALES)
)
test_so_it_does_with_a_kv_cache_of_codes = repeated(
    short.test_so_it_does_with_a_kv_cache_of_codes, ("kv_cache_dtype", "family"), rest(short.BY_KV)
)
