"""Engines of every method against the graph that they were lowered from, in onnxruntime: the same numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginewright.builder import assembly
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import Checkpoint
from enginewright.dtypes import KV_CACHES
from enginewright.engine_file import EngineFile
from enginewright.errors import UsageError
from enginewright.passes.quant import METHODS, Bf16, Fp8, Int4Rtn, Int8Sq, Mxfp4, QuantConfig, quant_config
from enginewright.plugins.target import CPU_TARGET
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.graphs import checkpoint_of, random_tokens, relative_error
from tests.helpers.ragged import RaggedRun
from tests.helpers.tiny import MemoryCheckpoint

CALIBRATION = "The quick brown fox jumps over the lazy dog, and what is the capital of France? Paris, it answers.\n" * 8


def difference(
    checkpoint: Checkpoint,
    quant: QuantConfig,
    tokens: list[int],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str = "bf16",
) -> float:
    """relative_error of an engine's logits against its graph's."""
    graphs: list[ir.Model] = []
    lower = assembly.lower
    monkeypatch.setattr(assembly, "lower", lambda model, *rest: graphs.append(model.clone()) or lower(model, *rest))
    (folder / "data.txt").write_text(CALIBRATION)
    data = str(folder / "data.txt") if quant.calibrated else None
    config = BuildConfig(quant=quant, kv_cache_dtype=kv_cache_dtype, calib_data=data, gate=None)
    build_engine(checkpoint, config, folder / "x.engine")
    graph = graphs[-1]  # builds that calibrate have made a plan before
    expected = RaggedRun(graph, num_blocks=8).step({"text": tokens})["text"]
    with Engine.open(folder / "x.engine") as engine:
        (logits,) = score(CpuExecutor(engine, RuntimeConfig(max_num_seqs=1)), [tokens])
    return relative_error(logits, expected)


def activations_of(method: type[QuantConfig]) -> str:
    return "int8" if method().precision(CPU_TARGET).dtype == ir.DataType.INT8 else "bf16"


def bound(method: type[QuantConfig]) -> float:
    return tolerances.ENGINE_GRAPH[activations_of(method)]


FAMILIES = ("qwen3", "gemma3_text")
BY_METHOD = [(method, family) for method in METHODS for family in FAMILIES]
BY_GROUP = [(group, family) for group in (0, 32) for family in FAMILIES]
BY_SCALES = [(scales, family) for scales in ("tensor", "block") for family in FAMILIES]
BY_KV = [(kv, family) for kv in KV_CACHES if kv != "bf16" for family in FAMILIES]


def in_turn(cases: Sequence[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """One family of each method; tests/long has the other one."""
    return [case for n, case in enumerate(cases) if n % 4 in (0, 3)]


def name_of(value: Any) -> str:
    return value.info.name if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("method", "family"), in_turn(BY_METHOD), ids=name_of)
def test_an_engine_computes_its_graph(
    method: type[QuantConfig], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(53, seed=1).tolist()
    error = difference(checkpoint_of(family), method(), tokens, tmp_path, monkeypatch)
    assert error < bound(method)


@pytest.mark.parametrize(("group", "family"), in_turn(BY_GROUP))
def test_so_it_does_with_static_scales(
    group: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quant, tokens = Int8Sq(group, "static"), random_tokens(53, seed=1).tolist()
    assert difference(checkpoint_of(family), quant, tokens, tmp_path, monkeypatch) < bound(Int8Sq)


@pytest.mark.parametrize(("scales", "family"), in_turn(BY_SCALES))
def test_so_it_does_with_other_scales_of_fp8(
    scales: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that weights do not fill, and that end inside q, k, v, gate and up."""
    checkpoint, quant = (
        MemoryCheckpoint.tiny(family, hidden_size=180, intermediate_size=300, head_dim=30),
        Fp8(fp8_scales=scales),
    )
    error = difference(checkpoint, quant, random_tokens(53, seed=1).tolist(), tmp_path, monkeypatch)
    assert error < bound(Fp8)


@pytest.mark.parametrize(("kv_cache_dtype", "family"), in_turn(BY_KV))
def test_so_it_does_with_a_kv_cache_of_codes(
    kv_cache_dtype: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(53, seed=1).tolist()
    error = difference(checkpoint_of(family), Bf16(), tokens, tmp_path, monkeypatch, kv_cache_dtype)
    assert error < tolerances.ENGINE_GRAPH[f"{kv_cache_dtype} KV"]


def test_the_comparison_sees_a_wrong_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one layer, twice as large in the file as in the graph."""
    method = next(method for method in METHODS if method.info.name == "int8-wo")
    packed = assembly.packed

    def doubled(weight, progress):  # type: ignore[no-untyped-def]
        for piece in packed(weight, progress):
            if weight.value.name == "model.layers.1.mlp.down_proj.weight.scale":
                piece = (
                    (np.frombuffer(piece, np.float32) * np.where(np.arange(len(piece) // 4) == 3, 2, 1))
                    .astype("f4")
                    .data
                )
            yield piece

    monkeypatch.setattr(assembly, "packed", doubled)
    tokens = random_tokens(53, seed=1).tolist()
    assert difference(checkpoint_of("qwen3"), method(), tokens, tmp_path, monkeypatch) > 20 * bound(method)


def test_a_head_of_its_own_may_be_one_of_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(53, seed=1).tolist()
    for method in (Int4Rtn, Mxfp4, Fp8):
        quant = method(quantize_lm_head=True)
        assert difference(checkpoint_of("llama"), quant, tokens, tmp_path, monkeypatch) < bound(method)
        with EngineFile.open(tmp_path / "x.engine") as file:
            names = ("lm_head", "model.layers.0.mlp.down_proj", "model.embed_tokens")
            head, layer, table = (file.sections[f"weights/{name}.weight"].dtype for name in names)
            assert head == layer != table == "i8"


def test_a_tied_head_cannot_be(tmp_path: Path) -> None:
    config = BuildConfig(quant=Int4Rtn(quantize_lm_head=True))
    with pytest.raises(UsageError, match="--quantize-lm-head is not possible: the head shares its table"):
        build_engine(checkpoint_of("llama, biases, tied"), config, tmp_path / "x.engine")
    with pytest.raises(UsageError, match="--quantize-lm-head means nothing to --quant w8a8"):
        quant_config("w8a8", quantize_lm_head=True)
    assert not list(tmp_path.iterdir())
