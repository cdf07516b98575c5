"""ONNX files in standard ops: valid, run by onnxruntime without us, and as exact as their dtype."""

import stat
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from enginewright.builder.export import export_onnx
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError, UsageError
from tests import tolerances
from tests.helpers.onnx_run import run
from tests.helpers.tiny import OF_EACH_BLOCK, MemoryCheckpoint

TOKENS = np.arange(3, 20)[None] * 7


def tiny_graph(family: str) -> ir.Model:
    return build_graph(MemoryCheckpoint.tiny(family))


def feeds(graph: ir.Model, dtype: type[np.floating]) -> dict[str, np.ndarray]:
    """A past of 5 positions, then TOKENS."""
    values: dict[str, np.ndarray] = {"tokens": TOKENS, "positions": 5 + np.arange(TOKENS.shape[1])[None]}
    generator = np.random.default_rng(0)
    for value in graph.graph.inputs[2:]:
        assert value.shape is not None and value.name is not None
        shape = [5 if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape]
        values[value.name] = generator.standard_normal(shape).astype(dtype)
    return values


@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"),
    [("fp32", np.float32, tolerances.DENSE_LOGITS), ("fp16", np.float16, tolerances.DENSE_LOGITS_FP16)],
)
@pytest.mark.parametrize("family", OF_EACH_BLOCK)
def test_an_exported_file_runs(
    tmp_path: Path, family: str, dtype: str, kind: type[np.floating], tolerance: float
) -> None:
    graph = tiny_graph(family)
    path = tmp_path / "model.onnx"
    export_onnx(graph, path, dtype)
    onnx.checker.check_model(str(path), full_check=True)
    assert {entry.domain for entry in onnx.load(str(path)).opset_import} == {""}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert names == [output.name for output in graph.graph.outputs]
    outputs = dict(zip(names, session.run(names, feeds(graph, kind)), strict=True))
    expected = run(graph, {**feeds(graph, np.float32)})
    for name in names:
        assert outputs[name].dtype == kind
        assert np.abs(outputs[name] - expected[name]).max() < tolerance, name


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_large_weights_go_next_to_the_file(tmp_path: Path, dtype: str) -> None:
    graph = tiny_graph("qwen3")
    export_onnx(graph, tmp_path / "one.onnx", dtype)
    export_onnx(graph, tmp_path / "two.onnx", dtype, embed_limit_bytes=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.onnx", "two.onnx", "two.onnx.data"]
    data_bytes = (tmp_path / "two.onnx.data").stat().st_size
    assert abs((tmp_path / "one.onnx").stat().st_size - (tmp_path / "two.onnx").stat().st_size - data_bytes) < 10_000
    kind = np.float32 if dtype == "fp32" else np.float16
    one, two = (
        onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx")).run(["logits"], feeds(graph, kind))[0]
        for name in ("one", "two")
    )
    np.testing.assert_array_equal(one, two)


def test_a_link_is_followed_and_the_mode_of_its_target_stays(tmp_path: Path) -> None:
    """Weights go next to the file that is written, whose name they have."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "target.onnx").touch(0o600)
    (tmp_path / "link.onnx").symlink_to("folder/target.onnx")
    export_onnx(tiny_graph("llama"), tmp_path / "link.onnx", embed_limit_bytes=1000)
    assert (tmp_path / "link.onnx").is_symlink()
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["target.onnx", "target.onnx.data"]
    assert stat.S_IMODE((tmp_path / "folder" / "target.onnx").stat().st_mode) == 0o600
    onnxruntime.InferenceSession(str(tmp_path / "folder" / "target.onnx"))


def test_positions_are_exact_in_fp16(tmp_path: Path) -> None:
    """fp16 knows no whole number between 2048 and 2050: positions must not pass through it."""
    graph = tiny_graph("llama")
    export_onnx(graph, tmp_path / "model.onnx", "fp16")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    far = {"positions": 4001 + np.arange(TOKENS.shape[1])[None]}
    (logits,) = session.run(["logits"], feeds(graph, np.float16) | far)
    expected = run(graph, feeds(graph, np.float32) | far)["logits"]
    assert np.abs(logits - expected).max() < tolerances.DENSE_LOGITS_FP16


@pytest.mark.parametrize("embed_limit_bytes", [1000, 1 << 30])
def test_a_weight_beyond_fp16_is_named_and_nothing_is_left(tmp_path: Path, embed_limit_bytes: int) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama")
    checkpoint.stored = {**checkpoint.stored, "lm_head.weight": torch.full((307, 48), 1e5)}
    graph = build_graph(checkpoint)
    with pytest.raises(EngineError, match=r"lm_head\.weight cannot be written in fp16"):
        export_onnx(graph, tmp_path / "model.onnx", "fp16", embed_limit_bytes)
    assert list(tmp_path.iterdir()) == []
    export_onnx(graph, tmp_path / "model.onnx", "fp32", embed_limit_bytes)


def test_no_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        export_onnx(tiny_graph("llama"), tmp_path / "new" / "model.onnx")
    with pytest.raises(UsageError, match="it is a folder"):
        export_onnx(tiny_graph("llama"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("fp16", 2)])
def test_a_disk_without_space_is_said_before_weights_are_read(tmp_path: Path, dtype: str, element_bytes: int) -> None:
    """The head of 10^14 tokens is more than any disk holds, and nobody makes it."""
    graph, tokens = tiny_graph("llama"), 10**14
    head = graph.graph.initializers["lm_head.weight"]

    def read() -> ir.TensorProtocol:
        raise AssertionError("a weight was read")

    head.const_value = ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape([tokens, 48]), name=head.name)
    needed = f"it takes {tokens * 48 * element_bytes / 2**30:,.2f} GiB, [\\d,.]+ GiB are free"
    with pytest.raises(EngineError, match=f"the disk has no space for .*: {needed}") as caught:
        export_onnx(graph, tmp_path / "model.onnx", dtype)
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []


def test_exporting_changes_nothing_in_the_graph(tmp_path: Path) -> None:
    graph = tiny_graph("gemma3_text")
    before = [(node.name, node.domain, [str(value.type) for value in node.outputs]) for node in graph.graph]
    export_onnx(graph, tmp_path / "model.onnx", "fp16")
    after = [(node.name, node.domain, [str(value.type) for value in node.outputs]) for node in graph.graph]
    assert before == after
    assert {value.dtype for value in graph.graph.initializers.values()} == {ir.DataType.FLOAT, ir.DataType.INT64}
