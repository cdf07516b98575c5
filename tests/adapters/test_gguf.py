"""Adapters in GGUF files, converted as llama.cpp's convert_lora_to_gguf.py does, against what PEFT has saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from enginewright.adapter_file import AdapterFile
from enginewright.builder.adapters import Adapter, MergedCheckpoint, open_merged
from enginewright.builder.adapters.gguf import GgufAdapterFile
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.commands import prepare_adapter
from enginewright.builder.model_cache import prepared_adapter
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from tests.adapters.test_merge import CONFIG, WEIGHTS, trained
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model
from tests.helpers.tiny_gguf import finish, interleave

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": LINEARS, "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 11}}),
    ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    ("qwen2", {"target_modules": LINEARS, "alora_invocation_tokens": [5, 7]}),
]


def writer_of(path: Path, family: str = "llama", alpha: float | None = 5.0) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    return writer


def converted(folder: Path, path: Path, config: dict[str, Any]) -> Path:
    """Writes an adapter that PEFT has saved as the converter does."""
    family, stored = config["model_type"], json.loads((folder / CONFIG).read_text())
    writer = writer_of(path, family, stored["lora_alpha"])
    if stored.get("alora_invocation_tokens"):
        writer.add_array(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, stored["alora_invocation_tokens"])
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    for peft, tensor in load_file(folder / WEIGHTS).items():
        if ".base_layer." in peft:  # the converter leaves these out
            continue
        module, _, part = peft.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        values = tensor.float().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(module.rpartition(".")[2])
        if part == "lora_B" and heads is not None and family == "llama":
            values = interleave(values, config[heads])
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert name is not None, module
        writer.add_tensor(f"{name}.{part.lower()}", np.ascontiguousarray(values))
    return finish(writer)


@pytest.mark.parametrize(("family", "lora"), CASES, ids=[f"{f}-{list(lora)}" for f, lora in CASES])
def test_every_layer_gets_what_peft_adds(tmp_path: Path, family: str, lora: dict[str, Any]) -> None:
    config = tiny_config(family, tie_word_embeddings=False)
    trained(tiny_model(config), tmp_path / "peft", **lora)
    path = converted(tmp_path / "peft", tmp_path / "x.gguf", config)
    right, read = Adapter(tmp_path / "peft"), Adapter(path, base=config)
    assert read.updates.keys() == right.updates.keys() and read.name == "x"
    assert read.config.invocation_tokens == right.config.invocation_tokens
    for name, update in right.updates.items():
        product, expected = read.product(read.updates[name]), right.product(update)
        assert product is not None and expected is not None and torch.equal(product, expected), name


def test_prepared_and_merged(tmp_path: Path) -> None:
    config = tiny_config("llama")
    model = tiny_model(config)
    trained(model, tmp_path / "peft", target_modules=LINEARS)
    path = converted(tmp_path / "peft", tmp_path / "x.gguf", config)
    checkpoint = MemoryCheckpoint.of(model, config)
    merged = [open_merged(checkpoint, [f"{ref}:0.5"]) for ref in (tmp_path / "peft", path)]
    for name in checkpoint.tensors:
        assert torch.equal(merged[0].read(name), merged[1].read(name)), name
    build_engine(checkpoint, BuildConfig(quant=None, gate=None), engine := tmp_path / "base.engine")
    for ref, name in (tmp_path / "peft", "a.lora"), (path, "b.lora"):
        prepare_adapter(str(ref), engine, tmp_path / name)
    with AdapterFile.open(tmp_path / "a.lora") as a, AdapterFile.open(tmp_path / "b.lora") as b:
        assert a.file.sections.keys() == b.file.sections.keys()
        for name in a.file.sections:
            assert a.file.read_section(name) == b.file.read_section(name), name
        assert b.file.manifest.sources == {"x.gguf": GgufAdapterFile(path, config).source_hashes()["x.gguf"]}
    assert prepared_adapter(str(path), engine).name == "x.lora"


def test_alpha_of_zero_scales_nothing(tmp_path: Path) -> None:
    path = small(writer_of(tmp_path / "x.gguf", alpha=0.0), {"blk.0.attn_v": (6, 4), "blk.1.attn_v": (6, 3)})
    adapter = Adapter(path)
    for update in adapter.updates.values():
        expected = adapter.read(update, "b") @ adapter.read(update, "a")
        assert torch.allclose(adapter.product(update), expected, rtol=1e-6, atol=0)  # type: ignore[arg-type]


def small(writer: gguf.GGUFWriter, layers: dict[str, tuple[int, int]]) -> Path:
    """Finishes a file with random factors of 8 columns; layers: name → rows and rank."""
    rng = np.random.default_rng(0)
    for name, (rows, rank) in layers.items():
        writer.add_tensor(f"{name}.weight.lora_a", rng.standard_normal((rank, 8)).astype(np.float32))
        writer.add_tensor(f"{name}.weight.lora_b", rng.standard_normal((rows, rank)).astype(np.float32))
    return finish(writer)


def plain(writer: gguf.GGUFWriter) -> Path:
    return small(writer, {"blk.0.attn_v": (6, 4)})


def with_key(key: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        writer = writer_of(path)
        writer.add_float32(key, 1.0)
        return plain(writer)

    return write


def with_tensor(name: str, *shape: int) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        writer = writer_of(path)
        writer.add_tensor(name, np.ones(shape, np.float32))
        return plain(writer)

    return write


def as_model(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    return plain(writer)


def of_kind(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "control_vector")
    return plain(writer)


def cut(path: Path) -> Path:
    plain(writer_of(path))
    path.write_bytes(path.read_bytes()[:-100])
    return path


HOSTILE: list[tuple[Callable[[Path], Path], str]] = [
    (as_model, "is not an adapter"),
    (of_kind, "an adapter of type 'control_vector'"),
    (lambda path: plain(writer_of(path, alpha=None)), "alpha of the adapter x is None"),
    (lambda path: plain(writer_of(path, alpha=float("nan"))), "it must be a number"),
    (with_key("adapter.lora.beta"), r"adapter\.lora\.beta of the adapter x is not known"),
    (with_tensor("blk.0.attn_norm.weight", 8), r"attn_norm\.weight of the adapter x is not known"),
    (with_tensor("blk.0.attn_q.bias.lora_a", 4, 8), r"attn_q\.bias\.lora_a of the adapter x is not known"),
    (with_tensor("token_embd.weight.lora_a", 4, 8), r"token_embd\.weight\.lora_a of the adapter x is not known"),
    (with_tensor("blk.0.ffn_up_exps.weight.lora_a", 2, 4, 8), "ffn_up_exps.* is not known"),
    (with_tensor("blk.0.attn_output.weight.lora_a", 4, 8), "only one of its two factors"),
    (
        lambda path: small(writer_of(path), {f"blk.{i}.attn_v": (6, 1 + i % 2) for i in range(600)}),
        "300 layers of the adapter x have other ranks",
    ),
    (cut, "would end at"),
]


@pytest.mark.parametrize(("write", "text"), HOSTILE, ids=[text for _, text in HOSTILE])
def test_unusable_files(tmp_path: Path, write: Callable[[Path], Path], text: str) -> None:
    path = write(tmp_path / "x.gguf")
    with pytest.raises((UnsupportedModelError, EngineError), match=text):
        Adapter.open(str(path))


@pytest.mark.parametrize("base", [{}, {"num_attention_heads": 4, "num_key_value_heads": 2}])
def test_heads_that_do_not_fit(tmp_path: Path, base: dict[str, int]) -> None:
    path = small(writer_of(tmp_path / "x.gguf"), {"blk.0.attn_q": (6, 2)})
    adapter = Adapter(path, base=base)
    with pytest.raises(EngineError, match="does not fit the base model's attention heads"):
        adapter.read(next(iter(adapter.updates.values())), "b")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder or file"):
        Adapter.open(str(tmp_path / "x.gguf"))


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    config = tiny_config("llama")
    path = small(writer_of(tmp_path / "x.gguf"), {"blk.77.attn_v": (6, 2)})
    with pytest.raises(UnsupportedModelError, match=r"layers\.77\.self_attn\.v_proj.*does not have"):
        MergedCheckpoint(MemoryCheckpoint.of(tiny_model(config), config), [Adapter(path, base=config)])
