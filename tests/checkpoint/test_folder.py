"""Checkpoint folders: what is read, and everything that is refused, each with the name of the file at fault."""

import hashlib
import json
import resource
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from enginewright.builder.checkpoint import TensorInfo, files, open_checkpoint
from enginewright.errors import EngineError, UnsupportedModelError, UsageError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5).bfloat16(),
    "model.norm.weight": torch.linspace(-1, 1, 5),
    "lm_head.weight": torch.arange(21, dtype=torch.int8).reshape(7, 3),
    "scale": torch.tensor(3.5, dtype=torch.float16),
}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def write_tokenizer(folder: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in one safetensors file."""
    path = tmp_path / "Tiny-Model"
    path.mkdir()
    write_json(path / "config.json", {"model_type": "llama", "hidden_size": 5})
    write_tokenizer(path)
    save_file(TENSORS, path / "model.safetensors")
    return path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The folder's checkpoint in two files with an index."""
    (folder / "model.safetensors").unlink()
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, part in shards.items():
        save_file({name: TENSORS[name] for name in part}, folder / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def edit_index(folder: Path, **entries: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= entries
    write_json(path, index)


def assert_tensors(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors == {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in TENSORS.items()}
    for name, tensor in TENSORS.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_single_file(folder: Path) -> None:
    assert_tensors(folder)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "Tiny-Model"
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 5}
    assert checkpoint.generation_config == {}
    with pytest.raises(KeyError):
        checkpoint.read("model.norm.bias")


def test_shards(sharded: Path) -> None:
    assert_tensors(sharded)


def test_one_file_of_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_tensors(folder)


def test_generation_config(folder: Path) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 2]})
    assert open_checkpoint(str(folder)).generation_config == {"eos_token_id": [1, 2]}


def test_opening_and_reading_leave_other_tensors_alone(folder: Path) -> None:
    """Four GiB lie between the two small tensors: read as a whole, they would show in the memory's peak."""
    gap = 4 << 30
    header: dict[str, Any] = {
        "first": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "large": {"dtype": "F32", "shape": [gap // 4], "data_offsets": [4, 4 + gap]},
        "last": {"dtype": "F32", "shape": [1], "data_offsets": [4 + gap, 8 + gap]},
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 + gap)
        file.seek(0, 2)
        file.write(struct.pack("<f", 2.5))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors["large"] == TensorInfo(torch.float32, (gap // 4,))
    assert checkpoint.read("last").tolist() == [2.5]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


@pytest.mark.parametrize(
    "shard", ["../out.safetensors", "a/../../out.safetensors", "{}/out.safetensors", "..\\out.safetensors"]
)
def test_index_that_leads_out_of_the_folder(sharded: Path, shard: str) -> None:
    save_file({"scale": TENSORS["scale"]}, sharded.parent / "out.safetensors")
    edit_index(sharded, scale=shard.format(sharded.parent))
    with pytest.raises(EngineError, match=r"out\.safetensors.* leads out of the checkpoint's folder"):
        open_checkpoint(str(sharded))


def test_index_with_an_absolute_path_into_the_folder(sharded: Path) -> None:
    """An absolute path is refused, because its hash would be recorded under a name that only this machine has."""
    edit_index(sharded, **{name: str(sharded / "model-00002-of-00002.safetensors") for name in list(TENSORS)[2:]})
    with pytest.raises(EngineError, match="leads out of the checkpoint's folder"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_link_that_leads_out_of_the_folder(sharded: Path, name: str) -> None:
    outside = sharded.parent / "outside"
    (sharded / name).rename(outside)
    (sharded / name).symlink_to(outside)
    with pytest.raises(EngineError, match=f"{name}.* leads out of the checkpoint's folder"):
        open_checkpoint(str(sharded))


def test_link_within_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to("blob")
    assert_tensors(folder)


def test_links_of_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    """A snapshot's files are links into the folder `blobs` of its repository; links that lead elsewhere are refused."""
    repository = tmp_path / "models--owner--Tiny"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(index))
        (snapshot / path.name).symlink_to(f"../../blobs/{index}")
    assert_tensors(snapshot)
    (blobs / "0").rename(tmp_path / "elsewhere")
    (blobs / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"config\.json.* leads out"):
        open_checkpoint(str(snapshot))


def test_loop_of_links(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(EngineError, match=r"config\.json"):
        open_checkpoint(str(folder))


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(str(sharded))


def test_index_names_a_tensor_that_is_not_there(sharded: Path) -> None:
    edit_index(sharded, extra="model-00001-of-00002.safetensors")
    with pytest.raises(EngineError, match=r"model-00001-of-00002\.safetensors .* holds no tensor extra"):
        open_checkpoint(str(sharded))


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    edit_index(sharded, scale="model-00001-of-00002.safetensors")
    with pytest.raises(EngineError, match=r"model-00001-of-00002\.safetensors .* holds no tensor scale"):
        open_checkpoint(str(sharded))


def test_tensor_in_two_shards(sharded: Path) -> None:
    save_file({name: TENSORS[name] for name in ("scale", "lm_head.weight", "model.norm.weight")},
              sharded / "model-00002-of-00002.safetensors")  # fmt: skip
    with pytest.raises(EngineError, match=r"tensor model\.norm\.weight is in two files"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("weight_map", [None, {}, [], {"scale": 7}, {"scale": "pytorch_model-1.bin"}])
def test_index_without_sense(sharded: Path, weight_map: object) -> None:
    write_json(sharded / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(EngineError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(str(sharded))


def test_shards_without_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(EngineError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(str(sharded))


def test_truncated_or_longer_shard(sharded: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    whole = (sharded / name).read_bytes()
    for content in [whole[:length] for length in range(len(whole))] + [whole + b"\0"]:
        (sharded / name).write_bytes(content)
        with pytest.raises(EngineError, match=name):
            open_checkpoint(str(sharded))


def test_shard_that_shrinks_after_opening(sharded: Path) -> None:
    """An error is raised; a mapping that is read past the file's end would be a SIGBUS."""
    name = "model-00002-of-00002.safetensors"
    checkpoint = open_checkpoint(str(sharded))
    (sharded / name).write_bytes((sharded / name).read_bytes()[:-1])
    with pytest.raises(EngineError, match=name):
        checkpoint.read("scale")


def test_shard_that_changes_after_opening(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    save_file(TENSORS | {"scale": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(EngineError, match=r"changed while it was read: tensor scale"):
        checkpoint.read("scale")


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused(folder: Path, pickle: str) -> None:
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(UnsupportedModelError, match=f"{pickle} in .* is a pickle") as refused:
        open_checkpoint(str(folder))
    assert refused.value.exit_code == 3
    with pytest.raises(UnsupportedModelError, match=f"{pickle} in .* is a pickle"):
        open_checkpoint(str(folder / pickle))


def test_pickles_next_to_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert_tensors(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="holds no weights"):
        open_checkpoint(str(folder))


def test_code_in_the_folder_is_never_imported(folder: Path) -> None:
    trap = folder.parent / "trap-went-off"
    code = f"open({str(trap)!r}, 'w').close()\nclass Model: ...\nclass Config: ...\n"
    for name in ("modeling_trap.py", "configuration_trap.py", "tokenization_trap.py", "__init__.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_trap.Config", "AutoModelForCausalLM": "modeling_trap.Model"}
    write_json(folder / "config.json", {"model_type": "llama", "auto_map": auto_map, "trust_remote_code": True})
    write_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_trap.Model", None]}})
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer.config == {}
    for name in checkpoint.tensors:
        checkpoint.read(name)
    checkpoint.source_hashes()
    assert not trap.exists()
    assert not [name for name in sys.modules if name.endswith("_trap")]
    runpy.run_path(str(folder / "modeling_trap.py"))
    assert trap.exists(), "the trap itself works"


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a checkpoint: it holds no config\.json") as refused:
        open_checkpoint(str(tmp_path))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"model_type": "\xff"}', "is not UTF-8 text"),
        (b" " * (files.CONFIG_LIMIT_BYTES + 1), "is too large: more than 16 MiB"),
        (b"{}", "names no model_type"),
        (b'{"model_type": 7}', "names no model_type"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a pointer of Git LFS"),
    ],
)
def test_unreadable_config(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(EngineError, match=rf"config\.json in .*{message}"):
        open_checkpoint(str(folder))


def test_weights_that_git_lfs_did_not_fetch(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(EngineError, match="git lfs pull"):
        open_checkpoint(str(folder))


def test_source_hashes(sharded: Path) -> None:
    write_json(sharded / "generation_config.json", {})
    (sharded / "README.md").write_text("not read, not hashed")
    checkpoint = open_checkpoint(str(sharded))
    expected = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sharded.iterdir()
        if path.name != "README.md"
    }
    assert checkpoint.source_hashes() == expected
    assert list(checkpoint.source_hashes()) == sorted(expected)
    (sharded / "config.json").write_text("{}")
    assert checkpoint.source_hashes() == expected, "hashed once an instance"


@pytest.mark.parametrize("ref", ["Tiny-Modle", "./Tiny-Modle", "Tiny-Model.gguf"])
def test_did_you_mean(folder: Path, ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(UsageError, match=r"Did you mean Tiny-Model\?") as refused:
        open_checkpoint(ref)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "ref", ["", "no-such-thing", "/no/such/thing", "a/b/c", "x\0y", "n" * 5000, "./a/b", "~nobody-of-this-name/x"]
)
def test_nothing_there(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        open_checkpoint(ref)
    assert "hub id" in str(refused.value) or "cannot be read" in str(refused.value)


def test_a_file_of_the_folder_was_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=f"Name the folder: {folder}"):
        open_checkpoint(str(folder / "model.safetensors"))
