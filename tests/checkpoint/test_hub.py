"""Hub ids, against a hub of our own on this machine."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save
from tokenizers import Tokenizer, models

from enginewright.builder.adapters import Adapter, adapter, merge
from enginewright.builder.checkpoint import Checkpoint, hub, open_checkpoint, opening
from enginewright.builder.draft import open_draft
from enginewright.builder.models import build_graph, check_config
from enginewright.cli import main
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from tests.helpers.adapters import trained
from tests.helpers.hub_server import Hub, serving
from tests.helpers.tiny import OF_KERNELS, tiny_checkpoint, tiny_config, tiny_model

TEXTS = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).to_str().encode(),
    "README.md": b"not needed",
}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub at work; open_checkpoint asks it, with a cache of its own."""
    with serving(TEXTS) as served:
        where: dict[str, Any] = {"endpoint": served.endpoint, "cache_dir": tmp_path / "cache"}
        monkeypatch.setattr(opening, "download", functools.partial(hub.download, **where))
        monkeypatch.setattr(adapter, "download_adapter", functools.partial(hub.download_adapter, **where))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield served


def shard(**values: float) -> bytes:
    return save({name: torch.tensor([value]) for name, value in values.items()})


def assert_opens(ref: str, **values: float) -> Checkpoint:
    checkpoint = open_checkpoint(ref)
    assert {name: checkpoint.read(name).item() for name in checkpoint.tensors} == values
    return checkpoint


def test_one_file(remote: Hub) -> None:
    remote.files |= {"model.safetensors": shard(x=1.5), "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"onnx"}
    checkpoint = assert_opens("owner/Tiny", x=1.5)
    assert checkpoint.name == "Tiny"
    assert checkpoint.config == {"model_type": "llama"}
    assert sorted(remote.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(checkpoint.source_hashes()) == sorted(remote.fetched)
    assert_opens("owner/Tiny@main", x=1.5)
    assert len(remote.fetched) == 3, "what is in the cache is not fetched again"


def test_shards_of_the_index_and_no_others(remote: Hub) -> None:
    index = {"weight_map": {"x": "part/a.safetensors", "y": "b.safetensors"}}
    remote.files |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "part/a.safetensors": shard(x=1.0),
        "b.safetensors": shard(y=2.0),
        "consolidated.safetensors": shard(z=3.0),
    }
    checkpoint = assert_opens("owner/Tiny", x=1.0, y=2.0)
    assert "part/a.safetensors" in checkpoint.source_hashes()
    assert "consolidated.safetensors" not in remote.fetched


def test_a_head_is_to_be_downloaded_first(remote: Hub) -> None:
    """A head on the hub is refused as the model and as the draft, and its weights are not fetched."""
    remote.files |= {"config.json": b'{"medusa_num_heads": 3}', "medusa_lm_head.safetensors": shard(x=1.0)}
    with pytest.raises(
        UsageError, match=r"proposes draft tokens for one: medusa\n.*`hf download OWNER/NAME --local-dir FOLDER`"
    ):
        open_draft("owner/Tiny")
    assert "medusa_lm_head.safetensors" not in remote.fetched


def test_index_of_the_hub_that_leads_out(remote: Hub, tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(shard(x=1.0))
    index = {"weight_map": {"x": "../../../../out.safetensors"}}
    remote.files["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(EngineError, match="leads out of the checkpoint's folder"):
        open_checkpoint("owner/Tiny")


def test_the_config_of_a_quantized_checkpoint_next_to_its_own(remote: Hub) -> None:
    remote.files["model.safetensors"] = shard(x=1.0)
    remote.files["hf_quant_config.json"] = json.dumps({"quantization": {"quant_algo": "FP8"}}).encode()
    checkpoint = assert_opens("owner/Tiny", x=1.0)
    assert checkpoint.config["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "FP8"}


def test_without_network_the_cache_serves(remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.files["model.safetensors"] = shard(x=1.5)
    assert_opens("owner/Tiny", x=1.5)
    closed = functools.partial(hub.download, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(opening, "download", closed)
    assert_opens("owner/Tiny", x=1.5)
    with pytest.raises(EngineError, match=r"owner/Other cannot be downloaded: .*the hub cannot be reached") as refused:
        open_checkpoint("owner/Other")
    assert refused.value.exit_code == 1
    assert "hf download owner/Other --local-dir FOLDER" in refused.value.fix


def test_an_adapter(remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tiny_model(tiny_config("llama")), tmp_path / "saved", target_modules=["q_proj"])
    saved = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    with pytest.raises(UsageError, match="owner/Tiny on the hub is not an adapter"):
        Adapter.open("owner/Tiny")
    remote.files |= {"adapter_config.json": saved["adapter_config.json"], "adapter_model.bin": b"pickle"}
    with pytest.raises(UnsupportedModelError, match=r"adapter_model\.bin"):
        Adapter.open("owner/Tiny")
    remote.files |= saved
    for ref in ("owner/Tiny", "owner/Tiny@main", "owner/Tiny:0.5"):
        opened = merge._open(ref, {}) if ":" in ref else Adapter.open(ref)
        assert opened.name == "Tiny" and len(opened.updates) == 3
        assert opened.source_hashes.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert sorted(remote.fetched) == ["adapter_config.json", "adapter_model.safetensors"]
    remote.refusal = (503, "")
    assert Adapter.open("owner/Tiny").name == "Tiny", "from the cache"
    remote.refusal = None
    with pytest.raises(UsageError, match=r"there is no adapter owner/Other\b"):
        Adapter.open("owner/Other")
    with pytest.raises(UsageError, match="no such folder"):
        Adapter.open("./owner/Tiny")


def test_only_what_is_cached(remote: Hub) -> None:
    remote.files["model.safetensors"] = shard(x=1.5)
    with pytest.raises(EngineError, match="the cache does not have it, and downloads are disabled") as refused:
        open_checkpoint("owner/Tiny", only_cached=True)
    assert remote.fetched == [] and "hf download owner/Tiny" in refused.value.fix
    open_checkpoint("owner/Tiny")
    assert open_checkpoint("owner/Tiny", only_cached=True).read("x").item() == 1.5


def test_told_to_stay_offline(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.files["model.safetensors"] = shard(x=1.5)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="HF_HUB_OFFLINE is set"):
        open_checkpoint("owner/Tiny")


@pytest.mark.parametrize("status", [500, 503])
def test_hub_out_of_order(remote: Hub, status: int) -> None:
    remote.refusal = (status, "")
    with pytest.raises(EngineError, match="the hub cannot be reached"):
        open_checkpoint("owner/Tiny")


def test_no_such_repository(remote: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder here, and no such repository on the hub") as refused:
        open_checkpoint("owner/Nothing")
    assert refused.value.exit_code == 2
    (tmp_path / "owner" / "Nothing-1B").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"Did you mean owner/Nothing-1B\?"):
        open_checkpoint("owner/Nothing-2B")


def test_no_such_revision(remote: Hub) -> None:
    with pytest.raises(UsageError, match="owner/Tiny has no revision v7"):
        open_checkpoint("owner/Tiny@v7")


def test_gated(remote: Hub) -> None:
    remote.refusal = (403, "GatedRepo")
    with pytest.raises(EngineError, match="the hub denies access to owner/Tiny") as refused:
        open_checkpoint("owner/Tiny")
    assert "hf auth login" in refused.value.fix


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba2"}, "models of type 'mamba2' are not implemented"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rope_type = 'ntk'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method = 'aqlm'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 32}}, "bits = 5"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"attention_multiplier": 2.0}, "attention_multiplier = 2.0"),
    ],
)
def test_no_weights_are_fetched_of_a_model_that_cannot_be_built(
    remote: Hub, changes: dict[str, Any], said: str, sharded: bool, tmp_path: Path
) -> None:
    index = {"model.safetensors.index.json": json.dumps({"weight_map": {"x": "a.safetensors"}}).encode()}
    config = json.dumps(tiny_config("llama") | changes).encode()
    weights = {"a.safetensors": shard(x=1.0)} if sharded else {"model.safetensors": shard(x=1.0)}
    remote.files |= {"config.json": config} | weights | (index if sharded else {})
    for command in (("build", "-o", str(tmp_path / "x.engine")), ("export", "--onnx", str(tmp_path / "x.onnx"))):
        result = CliRunner().invoke(main, [command[0], "owner/Tiny", *command[1:]])
        assert result.exit_code == 3 and said in result.stderr, result.output
    assert "config.json" in remote.fetched and not [name for name in remote.fetched if name in weights]


@pytest.mark.parametrize(
    ("missing", "said"),
    [("tokenizer.json", "tokenizer.json is missing"), ("config.json", "owner/Tiny on the hub is not a checkpoint")],
)
def test_no_weights_are_fetched_without_a_tokenizer_or_a_config(remote: Hub, missing: str, said: str) -> None:
    remote.files["model.safetensors"] = shard(x=1.0)
    del remote.files[missing]
    with pytest.raises(EngineError, match=said):
        open_checkpoint("owner/Tiny")
    assert "model.safetensors" not in remote.fetched


@pytest.mark.parametrize("family", OF_KERNELS)
def test_weights_are_fetched_of_a_model_that_can_be_built(remote: Hub, family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    remote.files |= {file.name: file.read_bytes() for file in folder.iterdir()}
    built = []
    checkpoint = open_checkpoint("owner/Tiny", check_config=lambda config: built.append(check_config(config)))
    assert built == [None] and "model.safetensors" in remote.fetched
    build_graph(checkpoint)


def test_the_config_of_a_quantized_checkpoint_is_enough_to_know_that_it_can_be_built() -> None:
    for settings in (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "mxfp4"},
    ):
        check_config(tiny_config("qwen3", quantization_config=settings))


def test_pickles_are_not_even_fetched(remote: Hub) -> None:
    remote.files["pytorch_model.bin"] = b"pickle"
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin in owner/Tiny is a pickle"):
        open_checkpoint("owner/Tiny")
    assert remote.fetched == []


def test_several_gguf_files(remote: Hub) -> None:
    remote.files |= {"Tiny.Q4_0.gguf": b"", "Tiny.Q8_0.gguf": b""}
    with pytest.raises(UsageError, match=r"2 GGUF files: Tiny\.Q4_0\.gguf, Tiny\.Q8_0\.gguf"):
        open_checkpoint("owner/Tiny")


def test_no_weights(remote: Hub) -> None:
    with pytest.raises(EngineError, match="owner/Tiny on the hub holds no weights"):
        open_checkpoint("owner/Tiny")


@pytest.mark.parametrize("ref", ["owner/Tiny/more", "../Tiny", "owner/", "/owner/Tiny", "owner/Tiny@", "owner/-x"])
def test_what_is_no_hub_id(ref: str) -> None:
    assert hub.parse_hub_id(ref) is None
