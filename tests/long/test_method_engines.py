"""Engines of every method of a real model beside the graph that they were lowered from, in onnxruntime."""

from pathlib import Path

import pytest

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import METHODS, QuantConfig
from tests import tolerances
from tests.test_method_engines import activations_of, difference

TOKENS = [1, 504, 3575, 282, 4649, 314, 7042, 30, 198, 339, 5248, 2520, 327, 253, 1194, 28, 284, 2744]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.info.name)
def test_an_engine_computes_its_graph(
    method: type[QuantConfig], smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = difference(open_checkpoint(str(smollm2_folder)), method(), TOKENS, tmp_path, monkeypatch)
    bounds = tolerances.ENGINE_GRAPH_SMOLLM2
    assert error < bounds.get(method.info.name, bounds[activations_of(method)])
