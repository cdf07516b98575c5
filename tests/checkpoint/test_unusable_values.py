"""Values of the right syntax that nothing can be done with, in a checkpoint and in an engine: errors that name the key.

Each goes through the real command, where an exception that is no EngineError is a failed test.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from enginewright.builder.generation_config import check_generation_config
from enginewright.cli import main
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.commands.goldens import GOLDENS, Golden, Goldens, replay
from enginewright.runtime.core.params import default_params
from enginewright.runtime.engine import Engine
from enginewright.runtime.text.generation_config import find_fault
from tests.helpers.engines import copied
from tests.helpers.tiny import VOCAB_SIZE, tiny_checkpoint

BAD_GENERATION: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "0.7"}, "temperature must be a number, not '0.7'"),
    ({"temperature": -1}, "temperature must be between"),
    ({"temperature": True}, "temperature must be a number"),
    ({"temperature": [1]}, "temperature must be a number"),
    ({"temperature": 10**400}, "temperature must be between 0 and 1000"),
    ({"temperature": math.inf}, "temperature must be between"),
    ({"top_p": 1.5}, "top_p must be between"),
    ({"top_p": math.nan}, "top_p must be between"),
    ({"min_p": -0.1}, "min_p must be between"),
    ({"top_k": 20.5}, "top_k must be a whole number"),
    ({"top_k": "20"}, "top_k must be a whole number"),
    ({"top_k": -7}, "top_k must be between"),
    ({"repetition_penalty": -1.0}, "repetition_penalty must be between"),
    ({"do_sample": "true"}, "do_sample must be true or false"),
    ({"eos_token_id": "1"}, "eos_token_id must be a token id"),
    ({"eos_token_id": 1.0}, "eos_token_id must be a token id"),
    ({"eos_token_id": True}, "eos_token_id must be a token id"),
    ({"eos_token_id": {"id": 1}}, "eos_token_id must be a token id"),
    ({"eos_token_id": [1, None]}, "eos_token_id must be a token id"),
    ({"eos_token_id": [1, VOCAB_SIZE]}, f"names token {VOCAB_SIZE}"),
    ({"eos_token_id": -1}, "names token -1"),
]
GOOD_GENERATION: list[dict[str, Any]] = [
    {},
    {"temperature": None, "top_k": None, "top_p": None, "min_p": None, "eos_token_id": None, "do_sample": None},
    {"do_sample": False, "temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0.0, "repetition_penalty": 0},
    {"do_sample": True, "temperature": 1, "top_k": 50, "top_p": 1, "repetition_penalty": 1, "eos_token_id": [1, 2]},
    {"eos_token_id": VOCAB_SIZE - 1, "max_length": "not ours", "transformers_version": "5"},
]


def run(code: int, *arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert code == 0 or isinstance(result.exception, SystemExit | None), "no traceback"
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


@pytest.mark.parametrize(("config", "said"), BAD_GENERATION)
def test_generation_config_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said) as error:
        check_generation_config(config, VOCAB_SIZE)
    assert error.value.exit_code == 1 and len(str(error.value)) < 500


@pytest.mark.parametrize("config", GOOD_GENERATION)
def test_what_published_configs_have_is_taken(config: dict[str, Any], engine_path: Path, tmp_path: Path) -> None:
    check_generation_config(config, VOCAB_SIZE)
    path = copied(engine_path, tmp_path / "x.engine", {"generation_config.json": json.dumps(config).encode()})
    with Engine.open(path) as opened:
        params = default_params(opened, temperature=0.5, seed=1)
        assert params.top_p == 1 and params.repetition_penalty == 1
        assert default_params(opened).max_tokens is None
        assert all(0 <= token < VOCAB_SIZE for token in opened.eos_token_ids)


def test_a_build_stops_at_the_generation_config(folder: Path, tmp_path: Path) -> None:
    change(folder, "generation_config.json", top_p=1.5)
    result = run(1, "build", folder, "-o", tmp_path / "x.engine")
    assert "generation_config.json cannot be used: top_p must be between 0 and 1, not 1.5" in result.stderr
    assert "pack the weights" not in result.stderr and not (tmp_path / "x.engine").exists()


def test_what_no_file_could_hold(folder: Path, tmp_path: Path) -> None:
    change(folder, "generation_config.json", comment="\ud800")
    assert "generation_config.json cannot be used" in run(1, "build", folder, "-o", tmp_path / "x.engine").stderr


def test_an_engine_with_such_a_config_is_refused_before_a_request(engine_path: Path, tmp_path: Path) -> None:
    for config, said in (({"top_k": "20"}, "top_k must be a whole"), ({"eos_token_id": [1, 9**9]}, "names token")):
        path = copied(engine_path, tmp_path / "x.engine", {"generation_config.json": json.dumps(config).encode()})
        assert said in run(5, "generate", path, "-p", "x", "--max-tokens", "1").stderr
        with pytest.raises(CorruptEngineError, match=said):
            Engine.open(path)


@pytest.mark.parametrize(
    ("section", "data", "said"),
    [
        ("chat_template", b"\xff\xfe{{ messages }}", "no UTF-8 text"),
        ("tokenizer_config.json", b'{"eos_token": 5}', "eos_token is 5, not a text"),
        ("tokenizer_config.json", b'{"eos_token": ["<e>"]}', "eos_token is \\['<e>'\\], not a text"),
        ("tokenizer_config.json", b'{"bos_token": {"content": 3}}', "bos_token is 3"),
        ("tokenizer_config.json", b"[]", "cannot be read"),
        ("generation_config.json", b"{", "cannot be read"),
        ("generation_config.json", b'"\xff"', "cannot be read"),
    ],
)
def test_texts_of_an_engine_are_checked_when_it_is_opened(
    section: str, data: bytes, said: str, engine_path: Path, tmp_path: Path
) -> None:
    path = copied(engine_path, tmp_path / "x.engine", {section: data})
    with pytest.raises(CorruptEngineError, match=said):
        Engine.open(path)
    assert section in run(5, "generate", path, "-p", "x", "--max-tokens", "1").stderr
    run(5, "verify", path)


def test_a_token_may_be_an_object_with_its_text(engine_path: Path, tmp_path: Path) -> None:
    config = b'{"eos_token": {"content": "<|turn|>", "lstrip": false}}'
    changed = {"tokenizer_config.json": config, "generation_config.json": b"{}"}
    with Engine.open(copied(engine_path, tmp_path / "x.engine", changed)) as opened:
        assert opened.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is 5, not a text"),
        ("tokenizer_config.json", {"eos_token": ["<e>"]}, "eos_token is ['<e>'], not a text"),
        ("tokenizer_config.json", {"eos_token": {"content": 1.5}}, "eos_token is 1.5, not a text"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "eos_token is not valid Unicode"),
        ("tokenizer_config.json", {"chat_template": "{{ '\udfff' }}"}, "is not valid Unicode"),
    ],
)
def test_tokens_of_a_checkpoint_are_texts(
    name: str, values: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    change(folder, name, **values)
    assert said in run(1, "build", folder, "-o", tmp_path / "x.engine").stderr


def test_a_template_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    assert "chat_template.jinja" in run(1, "build", folder, "-o", tmp_path / "x.engine").stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", 2**31),
        ("head_dim", 2**14),
        ("hidden_size", 2**40),
        ("intermediate_size", 2**62),
        ("num_hidden_layers", 2**40),
        ("num_attention_heads", 2**40),
        ("num_key_value_heads", 2**40),
        ("vocab_size", 2**62),
        ("max_position_embeddings", 2**31),
        ("max_position_embeddings", 10**400),
    ],
)
def test_absurd_sizes_are_refused_by_name(key: str, value: int, folder: Path, tmp_path: Path) -> None:
    change(folder, "config.json", **{key: value})
    result = run(3, "build", folder, "-o", tmp_path / "x.engine")
    assert f"{key} = {str(value)[:20]}" in result.stderr and "is possible" in result.stderr


def test_a_number_that_is_no_float(folder: Path, tmp_path: Path) -> None:
    change(folder, "config.json", rms_norm_eps=10**400)
    assert "rms_norm_eps is" in run(1, "build", folder, "-o", tmp_path / "x.engine").stderr


def test_an_absurd_window(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gemma3_text")
    change(folder, "config.json", sliding_window=2**40)
    assert f"sliding_window = {2**40}" in run(3, "build", folder, "-o", tmp_path / "x.engine").stderr


def goldens(prompt: Any = (1, 2), top: Any = ((3, -0.5),), tolerance: Any = 0.3) -> bytes:
    return json.dumps({"tolerance": tolerance, "entries": [{"prompt": prompt, "top": top}]}).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"measured", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "cannot be read"),
        (goldens(prompt="abc"), "cannot be read"),
        (goldens(prompt=[1.5]), "cannot be read"),
        (goldens(top=[[3]]), "cannot be read"),
        (goldens(tolerance="0.3"), "cannot be read"),
        (goldens(tolerance=math.nan), "cannot be read"),
        (b'{"tolerance": 1e999, "entries": []}', "cannot be read"),
        (goldens(tolerance=-0.1), "tolerance is -0.1"),
        (goldens(tolerance=1e30), "tolerance is 1e+30"),
        (b'{"tolerance": 0.3, "entries": []}', "there are none"),
        (goldens(prompt=[]), "prompt 0 has 0 tokens"),
        (goldens(prompt=[1] * 41), "prompt 0 has 41 tokens"),
        (goldens(prompt=[VOCAB_SIZE]), f"prompt 0 has token {VOCAB_SIZE}"),
        (goldens(prompt=[-1]), "prompt 0 has token -1"),
        (goldens(prompt=[2**63]), "prompt 0 has token"),
        (goldens(top=[]), "no log-probabilities"),
        (goldens(top=[[VOCAB_SIZE, -1.0]]), f"prompt 0 has token {VOCAB_SIZE}"),
        (goldens(top=[[-1, -1.0]]), "prompt 0 has token -1"),
    ],
)
def test_goldens_that_cannot_be_replayed(data: bytes, said: str, engine_path: Path, tmp_path: Path) -> None:
    path = copied(engine_path, tmp_path / "x.engine", {GOLDENS: data})
    assert said in run(5, "verify", path).stderr
    run(0, "verify", path, "--no-goldens")


def test_an_engine_that_gives_no_number_is_not_right(engine_path: Path) -> None:
    """A comparison with NaN is false; it is no pass."""
    logits = np.array([0.0, np.nan, 1.0], np.float32)
    goldens = Goldens(0.3, (Golden((0,), ((0, -1.0), (1, -2.0))),))
    with Engine.open(engine_path) as opened:
        (deviation,) = replay(goldens, lambda prompt: logits, opened.plan)
    assert deviation == math.inf


def test_every_setting_that_the_runtime_takes_is_checked() -> None:
    """`default_params` reads no key that is not checked here."""
    source = Path(default_params.__code__.co_filename).read_text()
    for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert key in source and find_fault({key: "x"}, VOCAB_SIZE) is not None
