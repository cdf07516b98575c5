"""Checkpoints that benchmarks make, and figures that they compute from times. No time is measured here."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peers.gguf_file import write_gguf
from protocol.figures import best_peer, ratios, shown
from protocol.idle_guard import Snapshot
from protocol.models import Model
from protocol.points import point
from protocol.results import Results
from protocol.rows import in_rows
from rescale import rescale
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from enginewright_bench.roofline import Rate, Roofline
from tests import tolerances
from tests.helpers.tiny_gguf import interleave

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 74,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Llama whose matrices lie on a grid of 4 bits, a step a row."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            step = torch.exp2(torch.randint(-7, -3, (len(parameter), 1)).float())
            codes = torch.randint(-7, 8, parameter.shape)
            codes[:, 0] = 7  # so that a row shows its step
            parameter.data = (step * codes).bfloat16()
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def logprobs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return model(torch.arange(37)[None]).logits[0].log_softmax(-1)


def off_the_grid(weight: torch.Tensor) -> float:
    """The largest distance of a row's numbers from whole multiples of its planted step, in steps."""
    steps = weight.double() / (weight.double().abs().amax(1, keepdim=True) / 7)
    return float((steps - steps.round()).abs().max())


def test_a_rescaled_checkpoint_computes_the_same_off_the_grid(checkpoint: Path, tmp_path: Path) -> None:
    rescale(checkpoint, tmp_path / "rescaled")
    before, after = logprobs(checkpoint), logprobs(tmp_path / "rescaled")
    kl = (before.exp() * (before - after)).sum(-1).mean()
    assert kl < tolerances.RESCALED_KL
    old, new = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "rescaled/model.safetensors")
    assert old.keys() == new.keys()
    matrices = [name for name, weight in old.items() if weight.ndim == 2 and "embed" not in name]
    assert len(matrices) == 7 * SIZES["num_hidden_layers"]
    for name in matrices:
        assert off_the_grid(old[name]) == 0, name
        assert off_the_grid(new[name]) > 0.2, name


def test_a_gguf_file_has_the_checkpoints_weights(checkpoint: Path, tmp_path: Path) -> None:
    write_gguf(checkpoint, tmp_path / "tiny.gguf")
    read, expected = gguf.GGUFReader(tmp_path / "tiny.gguf"), load_file(checkpoint / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert len(tensors) == len(expected.keys() - {"lm_head.weight"})
    for hf_name in expected.keys() - {"lm_head.weight"}:
        tensor, values = tensors[names.get_name(hf_name, (".weight",)) or ""], expected[hf_name].float().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(hf_name.split(".")[-2])
        values = interleave(values, SIZES[heads]) if heads else values
        stored = torch.from_numpy(tensor.data.copy())
        stored = stored.view(torch.bfloat16) if values.ndim == 2 else stored
        assert torch.equal(stored.float(), torch.from_numpy(values)), hf_name
    for key in ("attention.head_count_kv", "embedding_length", "vocab_size", "rope.dimension_count"):
        assert f"llama.{key}" in read.fields


def test_points_are_read_from_their_names() -> None:
    prefill, decode, in_flight = map(point, ("prefill-512", "decode-4096x8", "in-flight-32x128x64"))
    assert (prefill.prompts, prefill.length, prefill.repeats, prefill.counted) == (1, 512, 1, 512)
    assert (point("prefill-100").repeats, point("prefill-100").counted) == (5, 500)
    assert (decode.prompts, decode.length, decode.counted) == (8, 4096, 8 * decode.tokens)
    assert (in_flight.prompts, in_flight.length, in_flight.counted) == (32, 128, 32 * 64)
    assert decode.positions(5) == 4096 + 6 * decode.tokens + 8
    assert point("decode-0x1").length == 1
    with pytest.raises(SystemExit, match="is no point"):
        point("decode-512")


def test_the_roofline_of_a_point(checkpoint: Path) -> None:
    model = Model("tiny", checkpoint, timed=True, judged=False)
    state = load_file(checkpoint / "model.safetensors")
    body = sum(weight.numel() for name, weight in state.items() if weight.ndim == 2 and "embed" not in name)
    head = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert (model.body_weights, model.head_weights, model.kv_values) == (body, head, 2 * 2 * 3 * 8)
    fast_memory = Roofline("any", 1, {"fp32": Rate("", 1.0), "int8": Rate("", 1e9)}, 1, 1e30)
    fast_dots = Roofline("any", 1, {"fp32": Rate("", 1e30)}, 1, 1e9)
    prefill, decode = point("prefill-32"), point("decode-100x8")
    assert prefill.roofline_seconds(model, fast_memory, "int8", 7.0, 3.0) == pytest.approx(
        2 * (512 * body + 16 * head) / 1e9
    )
    steps = decode.tokens
    read = steps * 1000.0 + sum(8 * (100 + step) * 3.0 for step in range(steps))
    assert decode.roofline_seconds(model, fast_dots, "int8", 1000.0, 3.0) == pytest.approx(read / 1e9)
    multiplied = steps * 8 * 2 * (body + head)
    assert decode.roofline_seconds(model, fast_memory, "int8", 1000.0, 3.0) == pytest.approx(multiplied / 1e9)


def row(name: str, peer: str | None, seconds: list[float], setting: str = "") -> dict[str, Any]:
    found = {"name": name, "peer": peer, "setting": setting, "precision": "", "seconds": seconds}
    return found | {"roofline_seconds": [time / 2 for time in seconds]}


def measured() -> dict[str, Any]:
    """Rounds of which the second was twice as slow for everybody: ratios within rounds do not see it."""
    return {
        "tokens": 100,
        "contestants": [
            row("engine", None, [1.0, 2.0, 1.0]),
            row("slow", "vLLM", [4.0, 8.0, 4.0]),
            row("quick", "OpenVINO", [1.5, 3.0, 1.4], "tuned"),
            row("quick", "OpenVINO", [3.0, 6.0, 3.0]),
            {"name": "gone", "peer": "gone", "setting": "", "not_measured": "it ended"},
        ],
    }


def test_ratios_are_those_of_rounds_to_the_best_setting_of_the_best_peer() -> None:
    there = shown(measured())
    assert there.keys() == {"engine", "slow", "quick"}
    assert (there["engine"].rate.median, there["engine"].roofline_share.median) == (100, 0.5)
    best = best_peer(there)
    assert best is not None and (best.name, best.setting) == ("quick", "tuned")
    (ratio,) = ratios(measured())
    assert (ratio.ours, ratio.peer) == ("engine", "quick")
    assert (ratio.value.median, ratio.value.min, ratio.value.max) == (1.5, pytest.approx(1.4), 1.5)


def test_results_are_written_with_their_losses_and_without_folders(tmp_path: Path) -> None:
    value = measured() | {"class": "8-bit", "isa": "native", "cores_taken_by_others": [0.0, 0.3, 0.0]}
    value["contestants"][0] = row("engine", None, [2.0, 4.0, 2.0])
    value["contestants"][-1]["not_measured"] = f"it ended ({tmp_path.resolve()}/x.log)"
    machine = {"cpu": "a CPU", "processors": [0], "memory_bytes": 1, "system": "", "versions": {}, "dots": {}}
    settings = {"threads": 1, "rounds": 3, "noisy": True, "quick": False}
    results = Results(tmp_path / "out/cpu", add=False, hidden=tmp_path)
    results.about(settings, machine)
    results.put("speed", "tiny, 8-bit", value, "prefill-512")
    texts = {suffix: (tmp_path / f"out/cpu.{suffix}").read_text() for suffix in ("json", "md", "svg")}
    assert all(str(tmp_path) not in text for text in texts.values())
    for part in ("0.75 × (0.70–0.75) slower", "slower in every round 1 times", "Not to be quoted", "0.30 cores"):
        assert part in texts["md"], part
    assert "WORK/x.log" in texts["md"]
    again = Results(tmp_path / "out/cpu", add=True, hidden=tmp_path)
    again.render()
    assert {suffix: (tmp_path / f"out/cpu.{suffix}").read_text() for suffix in texts} == texts


def test_work_of_others_is_what_neither_we_nor_our_workers_did() -> None:
    before, after = Snapshot(wall=10.0, busy=100.0, own=40.0), Snapshot(wall=12.0, busy=103.0, own=42.0)
    assert after.elsewhere(before) == pytest.approx(0.5)


VALUES = ({"a": {"b": [{"c": [1, 2.5e-7]}, {}], "d": []}, "é": {}}, [[1, 2], "x"], [], None, [1, {"a": [{"b": 2}]}])


@pytest.mark.parametrize("value", VALUES)
def test_a_file_of_rows_is_the_same_value(value: object) -> None:
    assert json.loads(in_rows(value)) == value


def test_a_row_has_a_line() -> None:
    text = in_rows({"speed": {"rows": [{"name": "x", "seconds": [1, 2]}, {"name": "y"}]}, "format": 1})
    assert [line.strip() for line in text.splitlines()] == [
        "{",
        '"speed": {',
        '"rows": [',
        '{"name": "x", "seconds": [1, 2]},',
        '{"name": "y"}',
        "]",
        "},",
        '"format": 1',
        "}",
    ]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_are_as_the_scripts_write_them(path: Path) -> None:
    text = path.read_text()
    assert text == in_rows(json.loads(text)) + "\n"
