"""The tokenizer of a checkpoint folder: which file says what, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from enginewright.builder.checkpoint import TokenizerFiles, open_checkpoint
from enginewright.errors import EngineError, UnsupportedModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def tokenizer_of(folder: Path, **config: Any) -> TokenizerFiles:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return open_checkpoint(str(folder)).tokenizer


def test_tokenizer_json_is_handed_on_as_it_is(folder: Path) -> None:
    tokenizer = open_checkpoint(str(folder)).tokenizer
    assert tokenizer.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert tokenizer.config == {}
    assert tokenizer.chat_template is None


def test_config_keeps_tokens_as_text_and_flags(folder: Path) -> None:
    tokenizer = tokenizer_of(
        folder,
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        unk_token=None,
        add_bos_token=True,
        add_eos_token=None,
        tokenizer_class="LlamaTokenizer",
        model_max_length=10**30,
        added_tokens_decoder={"0": {"content": "<unk>"}},
    )
    assert tokenizer.config == {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def test_special_tokens_map_fills_in(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}')
    assert tokenizer_of(folder, eos_token="</s>").config == {"bos_token": "<b>", "eos_token": "</s>"}


def test_chat_template(folder: Path) -> None:
    assert tokenizer_of(folder, chat_template="text").chat_template == "text"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert tokenizer_of(folder, chat_template=named).chat_template == "plain"
    assert tokenizer_of(folder, chat_template=named[:1]).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert tokenizer_of(folder).chat_template == "json"
    assert tokenizer_of(folder, chat_template="text").chat_template == "text"
    (folder / "chat_template.jinja").write_text("jinja\n")
    assert tokenizer_of(folder, chat_template="text").chat_template == "jinja\n"


def test_chat_template_of_another_kind(folder: Path) -> None:
    with pytest.raises(EngineError, match="chat template"):
        tokenizer_of(folder, chat_template={"default": "x"})


def test_tokenizer_files_are_hashed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x")
    (folder / "tokenizer_config.json").write_text("{}")
    hashed = open_checkpoint(str(folder)).source_hashes().keys()
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= hashed


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"tokenizer\.json is missing"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json"])
def test_tokenizer_of_another_kind(folder: Path, other: str) -> None:
    (folder / "tokenizer.json").rename(folder / other)
    with pytest.raises(UnsupportedModelError, match=rf"has {other} but no tokenizer\.json") as refused:
        open_checkpoint(str(folder))
    assert "save_pretrained" in refused.value.fix


MERGE_TO_NO_TOKEN = b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}'  # tokenizers panics


@pytest.mark.parametrize(
    "content", [MERGE_TO_NO_TOKEN, b"", b"{}", b'{"model": {"type": "BPE"}}', b"\xff", b"[" * 100_000]
)
def test_broken_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"tokenizer\.json in .* is not a tokenizer"):
        _ = open_checkpoint(str(folder)).tokenizer
