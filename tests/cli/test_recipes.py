"""`engine build --recipe`: each shipped recipe builds, flags go before it, and what is wrong in one is named."""

import json
import tomllib
from pathlib import Path

import pytest

from enginewright.cli.recipes import SHIPPED, purpose_of
from enginewright.engine_file import EngineFile
from tests.helpers.command import run_engine
from tests.helpers.odd_files import make_sparse
from tests.helpers.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_all_of_configs_is_shipped() -> None:
    assert sorted(SHIPPED) == sorted(path.stem for path in (ROOT / "configs").glob("*.toml")) != []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_builds_what_it_says(name: str, checkpoint: Path, tmp_path: Path) -> None:
    result = run_engine(
        "build", checkpoint, "--recipe", name, "--gate", "off", "-o", tmp_path / "x.engine"
    )  # its weights are random
    assert result.exit_code == 0, result.output
    text = SHIPPED[name].read_text()
    assert text.startswith("# "), "a recipe says what it is for"
    shown = " ".join(run_engine("build", "--help").stdout.split()).replace("cpu- ", "cpu-")
    assert purpose_of(SHIPPED[name]) in shown and str(tomllib.loads(text)["quant"]) in purpose_of(SHIPPED[name])
    with EngineFile.open(tmp_path / "x.engine") as file:
        recipe = file.manifest.recipe
        settings = tomllib.loads(text)
        assert {key: recipe[key] for key in settings if key in recipe} == {
            key: value for key, value in settings.items() if key in recipe
        }
        assert {"quant", "kv_cache_dtype"} <= set(settings)
    assert f"`{name}`" in (ROOT / "docs/build.md").read_text()


WITH_INT8_KV = ("cpu-int4-quick", "cpu-int4", "cpu-w8a8")


@pytest.mark.parametrize("name", WITH_INT8_KV[:1])
def test_a_recipes_kv_cache_gives_way_to_latent_vectors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typed option does not."""
    folder = tiny_checkpoint(tmp_path, "deepseek_v3")
    monkeypatch.chdir(tmp_path)
    taken = (folder, "--recipe", name, "--dry-run", "--json")
    result = run_engine("build", *taken)
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["recipe"]["kv_cache_dtype"] == "bf16" and "kv-int8" not in made["output"]
    assert made["notes"][0].startswith("the KV cache is bf16, not int8 as in the recipe: latent vectors")
    assert "as in the recipe" not in run_engine("build", *taken, "--kv-cache-dtype", "bf16").stdout
    refused = run_engine("build", *taken, "--kv-cache-dtype", "int8")
    assert refused.exit_code == 2 and "Leave --kv-cache-dtype out." in refused.stderr


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_of_ones_own_and_flags_before_it(checkpoint: Path, tmp_path: Path) -> None:
    settings = {
        "quant": "int4-rtn",
        "group_size": 64,
        "zero_points": True,
        "kv_cache_dtype": "int8",
        "max_seq_len": 128,
        "max_batch_size": 1024,
        "batch_invariant": False,
        "quantize_lm_head": False,  # as nobody asks for it
    }
    text = """
quant = "int4-rtn"
group-size = 64
zero_points = true
kv_cache_dtype = "int8"
max_seq_len = 128
max-batch-size = "1k"
target = ["cpu"]
"""
    taken = ("--recipe", recipe(tmp_path, text))
    flags = ("--group-size", "32", "--kv_cache_dtype", "bf16", "--max-seq-len", "64")
    replaced = {"group_size": 32, "kv_cache_dtype": "bf16", "max_seq_len": 64}
    for arguments, expected in (
        (taken, settings),
        ((*taken, *flags), settings | replaced),
        ((*flags, *taken), settings | replaced),
    ):
        result = run_engine("build", checkpoint, *arguments, "-o", tmp_path / "x.engine", "--dry-run", "--json")
        assert json.loads(result.stdout)["recipe"] == expected
    refused = run_engine("build", checkpoint, *taken, "--quant", "fp8", "--dry-run")
    assert refused.exit_code == 2 and "--group-size means nothing to --quant fp8" in refused.stderr


@pytest.mark.parametrize(
    ("text", "flags", "what", "origin"),
    [
        ("group_size = 64", ("--quant", "fp8"), "--group-size means nothing to --quant fp8", "--group-size comes"),
        ('quant = "fp8"', ("--bits", "5"), "--bits means nothing to --quant fp8", "--quant comes"),
        ('quant = "fp8"\nbits = 5', (), "--bits means nothing to --quant fp8", "--bits and --quant come"),
        ('quant = "fp8"\ncalib_size = 5', (), "--calib-size means nothing to", "--calib-size and --quant come"),
        ('quant = "auto"\nbits = 4.01', (), "Use 4.", "--bits comes"),
        ("max_seq_len = 99", ("--quant", "fp8", "--bits", "5"), "--bits means nothing to --quant fp8", ""),
        ('quant = "auto"\nbits = 5', ("--bits", "4.01"), "--bits 4.01 is not possible", ""),
    ],
)
def test_what_contradicts_a_recipe_is_said_to_be_in_it(
    text: str, flags: tuple[str, ...], what: str, origin: str, checkpoint: Path, tmp_path: Path
) -> None:
    result = run_engine("build", checkpoint, "--recipe", recipe(tmp_path, text), *flags, "-o", tmp_path / "x.engine")
    assert result.exit_code == 2 and what in result.stderr, result.output
    assert f"{origin} from the recipe" in result.stderr if origin else "recipe" not in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('qant = "bf16"', "mine.toml has the unknown key qant\nDid you mean quant?"),
        ("xyz = 1", "unknown key xyz\nThere are max_seq_len, "),
        ('output = "x"', "unknown key output"),
        ("dry_run = true", "unknown key dry_run"),
        ('model = "x"', "unknown key model"),
        ('[build]\nquant = "bf16"', "unknown key build"),
        ('quant = "bf61"', "mine.toml has the value 'bf61' for quant: 'bf61' is not one of 'bf16'"),
        ('max_seq_len = "0k"', "'0k' for max_seq_len: '0k' is not a whole number of at least 1"),
        ('quant = ["bf16", "fp8"]', "for quant: it takes one value"),
        ('zero_points = "perhaps"', "for zero_points: "),
        ("quant = 2026-01-01", "for quant: it takes text"),
        ('target = ["cpu", "tpu"]', "'tpu' is no target"),
        ("quant = ", "mine.toml is not TOML: "),
        ("\udcff", "mine.toml is not TOML: "),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(text: str, said: str, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, errors="surrogateescape")
    result = run_engine("build", checkpoint, "--recipe", path, "-o", tmp_path / "x.engine")
    assert result.exit_code == 2 and said in result.stderr, result.output
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.toml"]


def test_a_recipe_of_any_size_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    make_sparse(tmp_path / "mine.toml", 1 << 40)
    result = run_engine("build", checkpoint, "--recipe", tmp_path / "mine.toml")
    assert result.exit_code == 2 and "it has more than 4,194,304 bytes" in result.stderr


def test_no_such_recipe(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    near = run_engine("build", checkpoint, "--recipe", "cpu-in4")
    assert (
        near.exit_code == 2 and "there is no recipe cpu-in4" in near.stderr and "Did you mean cpu-int4?" in near.stderr
    )
    assert "Name one of them" in run_engine("build", checkpoint, "--recipe", "q/x.toml").stderr
    assert run_engine("build", checkpoint, "--recipe", tmp_path).exit_code == 2
