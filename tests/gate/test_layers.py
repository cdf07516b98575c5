"""Errors of single layers, as the finished file has them: against layers computed by themselves, and planted faults."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.gate.config import GateConfig
from enginewright.builder.gate.texts import held_out
from enginewright.builder.lower.pack import PackedForm
from enginewright.errors import QualityGateError
from enginewright.manifest import WEIGHTS
from enginewright.passes.graph import linear_of, nodes_of
from enginewright.passes.pass_manager import Pass, PassResult
from enginewright.passes.quant import Bf16, Fp8, Int4Rtn, Int8Wo, QuantConfig
from enginewright.passes.quant.method import Calibration, StoredTensor
from enginewright.passes.weights import RowReader, RowsTensor, read
from enginewright.runtime.commands.quality import Measured
from enginewright.runtime.engine import Engine
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

LOOSE = GateConfig(limits={"kl": 1e9, "top1": 0, "ppl": 1e9, "layer": 1e9})
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def measured(path: Path, quant: QuantConfig, family: str = "llama", **overrides: object) -> Measured:
    checkpoint = MemoryCheckpoint.tiny(family, **overrides)
    report = build_engine(checkpoint, BuildConfig(quant=quant, gate=LOOSE), path / "tiny.engine")
    assert report.quality.measured is not None
    return report.quality.measured


def inputs_of_layers(model: torch.nn.Module, texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Inputs of each linear layer of transformers' model, [tokens, K]."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, x, y, name=name: seen.setdefault(name, []).append(x[0][0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([list(text)]))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def eight_bits(x: torch.Tensor, group: int) -> torch.Tensor:
    """Runs of columns, each rounded to 127ths of its largest number."""
    runs = [run / run.abs().amax(1, keepdim=True) * 127 for run in x.split(group, dim=1)]
    scales = [run.abs().amax(1, keepdim=True) / 127 for run in x.split(group, dim=1)]
    return torch.cat([run.round() * scale for run, scale in zip(runs, scales, strict=True)], dim=1)


CASES = [("gemma3_text", Bf16()), ("qwen3", Int8Wo()), ("qwen2", Int4Rtn(zero_points=True)), ("llama", Fp8())]


@pytest.mark.parametrize(("family", "quant"), CASES, ids=str)
def test_errors_are_those_of_each_layer_by_itself(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    found = measured(tmp_path, quant, family)
    model = tiny_model(tiny_config(family))
    with Engine.open(tmp_path / "tiny.engine") as engine:
        texts = [text.tokens for text in held_out(engine.tokenizer, 307, 512)]
        sections = {name: form.nbytes for name, form in engine.file.sections.items()}
    inputs, weights = inputs_of_layers(model, texts), model.state_dict()
    layers = {layer.name: layer for layer in found.layers}
    tables = {name for name in layers if "layers" not in name}
    assert len(layers) - len(tables) == 3 * 4 and tables <= {"model.embed_tokens", "lm_head"}
    for name, layer in layers.items():
        parent, dot, own = name.rpartition(".")
        parts = [f"{parent}{dot}{part}" for part in FUSED.get(own, (own,))]
        weight = torch.cat([weights[f"{part}.weight"] for part in parts])
        method = quant.tables if name in tables else quant
        restored = method.restore(*method.quantize(weight, name))
        if name in tables:
            relative = (restored - weight).norm(dim=1) / weight.norm(dim=1)
        else:
            x = inputs[parts[0]]
            rounded = eight_bits(x, 32) if isinstance(quant, Int4Rtn) else x.bfloat16().float()
            relative = (rounded @ restored.t() - x @ weight.t()).norm(dim=1) / (x @ weight.t()).norm(dim=1)
        assert layer.error == pytest.approx(float(relative.mean()), rel=0.02), name
        assert layer.method == method.name
        stored = [size for section, size in sections.items() if section.startswith(f"{WEIGHTS}{name}.weight")]
        assert layer.nbytes == sum(stored)
    errors = [layer.error or 0.0 for layer in found.layers]
    assert errors == sorted(errors, reverse=True)


def refused_layers(path: Path, quant: QuantConfig, **overrides: object) -> list[str]:
    """The lines of the table of a build that its gate refuses; nothing is left of it."""
    checkpoint = MemoryCheckpoint.tiny("llama", **overrides)
    with pytest.raises(QualityGateError) as refused:
        build_engine(checkpoint, BuildConfig(quant=quant), path / "tiny.engine")
    assert refused.value.exit_code == 7
    assert list(path.iterdir()) == []
    lines = str(refused.value).splitlines()
    return lines[lines.index(next(line for line in lines if "layers with the largest errors" in line)) + 1 :]


FAULTS = [("self_attn.qkv_proj", Int4Rtn()), ("mlp.gate_up_proj", Int4Rtn()), ("mlp.down_proj", Int8Wo())]


@pytest.mark.parametrize(("part", "quant"), FAULTS, ids=str)
def test_doubled_scales_of_one_layer_are_refused_and_named(
    part: str, quant: QuantConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = type(quant).quantize

    def doubled(self: QuantConfig, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        codes, scale, *more = sound(self, rows, name)
        return (codes, scale * 2 if f"layers.1.{part}" in name else scale, *more)

    monkeypatch.setattr(type(quant), "quantize", doubled)
    first, second, *_ = refused_layers(tmp_path, quant)
    assert first.split()[:2] == [f"model.layers.1.{part}", quant.name]
    assert 95 < float(first.split()[2].rstrip("%")) < 105
    assert float(second.split()[2].rstrip("%")) < 15


def test_what_packing_does_wrong_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_module = sys.modules[PackedForm.__module__]
    sound = pack_module._r16_blocks

    def moved(weight: torch.Tensor) -> torch.Tensor:
        return sound(weight.roll(1, dims=1) if weight.shape[1] == 74 else weight)  # down_proj's

    monkeypatch.setattr(pack_module, "_r16_blocks", moved)
    first, *_ = refused_layers(tmp_path, Int8Wo(), num_hidden_layers=1)
    assert first.split()[0] == "model.layers.0.mlp.down_proj"


def test_a_wrong_table_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Int8Wo.quantize

    def doubled(self: QuantConfig, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        codes, scale = sound(self, rows, name)  # type: ignore[arg-type]
        return codes, scale * 2 if "lm_head" in name else scale

    monkeypatch.setattr(Int8Wo, "quantize", doubled)
    first, *_ = refused_layers(tmp_path, Int8Wo(), tie_word_embeddings=False)
    assert first.split()[0] == "lm_head"


@dataclass(frozen=True)
class Chosen(Int8Wo):
    """Chooses codes of twice one layer's weight."""

    name = "int8-wo"

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        return [_Choose()]


def _reader(weight: torch.Tensor) -> RowReader:
    return lambda begin, end: weight[begin:end]


class _Choose:
    name = "choose"

    def __call__(self, model: ir.Model) -> PassResult:
        for node in nodes_of(model, "MatMul"):
            linear = linear_of(node.outputs[0])
            if linear is not None and "layers.2.mlp.down_proj" in str(linear.weight.name):
                name, weight = str(linear.weight.name), 2 * read(linear.weight)
                doubled = RowsTensor(name, torch.float32, tuple(weight.shape), lambda weight=weight: _reader(weight))
                codes = Int8Wo().weights(doubled.initializer())
                linear.weight.const_value = StoredTensor(name, Int8Wo(), codes, source=linear.weight.const_value)
        return PassResult(1)


def test_codes_that_a_pass_has_chosen_are_compared_with_what_they_stand_for(tmp_path: Path) -> None:
    first, *others = measured(tmp_path, Chosen()).layers
    assert first.name == "model.layers.2.mlp.down_proj"
    assert first.error == pytest.approx(1, abs=0.01)
    assert all(layer.error is not None and layer.error < 0.02 for layer in others), "they see the source's activations"


def test_an_error_that_is_no_number_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Int8Wo.quantize

    def broken(self: QuantConfig, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        codes, scale = sound(self, rows, name)  # type: ignore[arg-type]
        return codes, torch.full_like(scale, torch.nan) if "layers.1.self_attn.o_proj" in name else scale

    monkeypatch.setattr(Int8Wo, "quantize", broken)
    with pytest.raises(QualityGateError) as refused:
        build_engine(MemoryCheckpoint.tiny("llama"), BuildConfig(quant=Int8Wo()), tmp_path / "x.engine")
    text = str(refused.value)
    assert "finite is 0, at least 1 passes" in text and "kl is not a number" in text
    assert text.index("model.layers.1.self_attn.o_proj") < text.index("model.layers.1.mlp")
    assert "NaN" in text
