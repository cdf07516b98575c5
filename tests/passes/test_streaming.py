"""Streaming a dense graph: what onnxruntime computes, on few weights at a time, whatever else is computed."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright.errors import EngineError
from enginewright.passes.graph import LinearLayer, nodes_of
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.quant import Int4Rtn, Int8Wo, QuantConfig
from enginewright.passes.quant.method import StoredTensor, stored
from enginewright.passes.quant.quantize import Quantize
from enginewright.passes.streaming import stream
from enginewright.passes.weights import as_torch, read
from tests import tolerances
from tests.helpers.graphs import CASES, QUANTS, DenseRun, dense_graph, graph_before, passes_before, random_tokens

LENGTHS = (11, 1, 23)


def texts() -> list[list[int]]:
    return [random_tokens(length, seed).tolist() for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_onnxruntimes(case: str, fused: bool) -> None:
    model = dense_graph(case)
    if fused:
        model, own = graph_before(case, "fuse_gate_up")
        own(model)
    streamed = stream(model, texts(), threads=2)
    for index, text in enumerate(texts()):
        expected = DenseRun(model).step(text)
        logits = torch.cat([streamed.logits(index, at, min(at + 5, len(text))) for at in range(0, len(text), 5)])
        assert np.abs(logits.numpy() - expected).max() < tolerances.DENSE_LOGITS


def test_neither_threads_nor_other_texts_change_a_bit() -> None:
    model = dense_graph("gemma3_text")
    together = stream(model, texts(), threads=3)
    for index, text in enumerate(texts()):
        alone = stream(model, [text])
        assert torch.equal(together.logits(index, 0, len(text)), alone.logits(0, 0, len(text)))


def test_every_linear_layer_but_the_head_is_seen_with_its_input() -> None:
    model, own = graph_before("qwen2", "fuse_gate_up")
    own(model)
    seen: dict[str, tuple[float, list[torch.Size]]] = {}

    def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        seen[str(linear.weight.name)] = (float(inputs[0].abs().max()), [x.shape for x in inputs])

    stream(model, texts(), visit)
    layers = [f"model.layers.{layer}" for layer in range(3)]
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert list(seen) == [f"{layer}.{part}.weight" for layer in layers for part in parts]
    for largest, shapes in seen.values():
        assert largest > 0
        assert [shape[0] for shape in shapes] == list(LENGTHS)
    assert seen["model.layers.2.mlp.down_proj.weight"][1][0][1] == 111


def test_a_weight_that_a_visit_changes_is_computed_with() -> None:
    def result(change: bool) -> torch.Tensor:
        model = dense_graph("llama")

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            if change and linear.weight.name == "model.layers.1.mlp.down_proj.weight":
                doubled = as_torch(linear.weight.const_value) * 2
                linear.weight.const_value = ir.tensor_adapters.TorchTensor(doubled)

        return stream(model, texts(), visit).logits(0, 0, 11)

    assert not torch.equal(result(True), result(False))


def test_an_op_that_is_not_known_is_named() -> None:
    model, own = graph_before("llama", "fuse_residual_norm")
    own(model)
    with pytest.raises(EngineError, match=r"\(AddRmsNorm\) has an op that cannot be streamed"):
        stream(model, texts())


WEIGHT_ERRORS = {"bf16": 2e-3, "int8-wo": 1e-2, "w8a8": 1e-2, "fp8": 3e-2, "int4-rtn": 0.12, "mxfp4": 0.12}


@pytest.mark.parametrize("quant", [*QUANTS, Int4Rtn(zero_points=True, group_size=64)], ids=lambda quant: quant.name)
def test_restored_weights_are_near_and_are_quantized_to_themselves(quant: QuantConfig) -> None:
    weight = torch.randn(37, 111, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    restored = quant.restore(*quant.quantize(weight, "weight"))
    error = (restored - weight).norm() / weight.norm()
    assert error < WEIGHT_ERRORS[quant.name]
    again = quant.restore(*quant.quantize(restored, "weight"))
    assert (again - restored).norm() / weight.norm() < error / 4


def store(model: ir.Model, config: QuantConfig, *names: str) -> None:
    """LinearLayer layers whose weight's name has one of these parts are stored in a format."""
    for node in nodes_of(model, "Transpose"):
        (weight,) = node.inputs
        assert weight is not None and weight.const_value is not None
        if any(name in str(weight.name) for name in names):
            plain = ir.Value(name=weight.name, shape=weight.shape, type=weight.type, const_value=weight.const_value)
            weight.const_value = StoredTensor(str(weight.name), config, config.weights(plain))


def test_what_is_stored_quantized_stays_as_it_is() -> None:
    """Weights that are stored quantized are fused, and pass unchanged through a method that would round differently."""
    model = dense_graph("llama")
    config = Int4Rtn(group_size=32, zero_points=True)
    store(model, config, "q_proj", "k_proj", "v_proj")
    initializers = model.graph.initializers
    parts = [stored(initializers[f"model.layers.1.self_attn.{part}_proj.weight"]) for part in "qkv"]
    earlier, quantize = passes_before("quantize_int8_wo", Int8Wo())
    results = run_passes(model, [*earlier, quantize])
    assert results["fuse_qkv"].rewrites == 3
    for index, kind in enumerate(("", ".scale", ".zero")):
        fused = read(initializers[f"model.layers.1.self_attn.qkv_proj.weight{kind}"])
        assert torch.equal(fused, torch.cat([read(one.parts[index]) for one in parts if one]))
    assert len(list(nodes_of(model, "GemmW4A8", domain="enginewright"))) == 3
    assert len(list(nodes_of(model, "GemmW8A16", domain="enginewright"))) == 3 * 3 + 1


def test_what_is_stored_in_different_formats_is_not_fused() -> None:
    model = dense_graph("llama")
    store(model, Int4Rtn(), "q_proj")
    results = run_passes(model, [*passes_before("quantize_bf16")[0], Quantize(Int8Wo())])
    assert results["fuse_qkv"].rewrites == 0
    assert "stored in different formats" in results["fuse_qkv"].refusals[0]
