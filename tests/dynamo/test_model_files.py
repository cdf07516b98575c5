"""The files of a model that frontends read, by what transformers makes of them."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from enginewright.dynamo.model_files import write_model_files
from enginewright.errors import EngineError
from enginewright.runtime.engine import Engine
from tests.helpers.serving import tiny_engine

MESSAGES = [{"role": "user", "content": "Hello, wörld"}]


def test_they_give_the_same_tokens(tmp_path: Path) -> None:
    with Engine.open(tiny_engine("calls tools")) as engine:
        assert write_model_files(engine, tmp_path) == tmp_path
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        text = engine.tokenizer.render_chat(MESSAGES)
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == text
        assert tokenizer(text)["input_ids"] == engine.tokenizer.encode(text)
        ends = GenerationConfig.from_pretrained(tmp_path).eos_token_id
        assert (ends if isinstance(ends, list) else [ends]) == list(engine.eos_token_ids)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["max_position_embeddings"] == engine.manifest.limits.max_seq_len
        assert config["vocab_size"] == engine.plan.vocab_size


def test_workers_of_one_engine_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Engine.open(tiny_engine()) as engine, Engine.open(tiny_engine("thinks")) as other:
        folder = write_model_files(engine)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert write_model_files(engine) == folder != write_model_files(other)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Engine.open(tiny_engine()) as engine, pytest.raises(EngineError, match=r"cannot be written to .*file"):
        write_model_files(engine, tmp_path / "file")
