"""The `engine` command as people meet it: what it prints, where, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from enginewright import _cpu
from enginewright.cli import QUANTS, main
from enginewright.engine_file import EngineFile
from enginewright.errors import UsageError
from enginewright.passes.quant import METHODS, quant_config
from tests.engines import copied
from tests.tiny import tiny_checkpoint


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.engine"
    result = run("build", checkpoint, "-o", path)
    assert result.exit_code == 0, result.output
    return path


def test_build_reports_phases_and_the_next_command(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    result = run("build", checkpoint, "--quant", "int8_wo", "--max_seq_len", "512", "--output", path)
    assert result.exit_code == 0 and result.stdout == ""
    for piece in ("pack the weights", "sha256:", "MB of weights", f"next     engine generate {path}"):
        assert piece in result.stderr


def test_build_names_its_output_after_model_and_format(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("build", checkpoint, "--json")
    report = json.loads(result.stdout)
    assert report["path"] == "tiny-llama-bf16.engine" and Path(report["path"]).stat().st_size == report["size_bytes"]


@pytest.mark.parametrize(("name", "dtype"), [("int8", "i8"), ("fp8", "e4m3")])
def test_the_kv_cache_is_what_the_build_was_asked_for(
    name: str, dtype: str, checkpoint: Path, engine: Path, tmp_path: Path
) -> None:
    result = run("build", checkpoint, "--kv-cache-dtype", name, "-o", tmp_path / "codes.engine", "--json")
    assert result.exit_code == 0, result.output
    bf16, codes = (json.loads(run("inspect", path, "--json").stdout) for path in (engine, tmp_path / "codes.engine"))
    (wide,), (narrow,) = bf16["kv_groups"], codes["kv_groups"]
    assert (wide["dtype"], narrow["dtype"]) == ("bf16", dtype)
    rows = 2 * wide["layers"] * wide["kv_heads"]  # of a token
    padded = -(-wide["head_dim"] // 32) * 32
    assert (wide["bytes_per_token"], narrow["bytes_per_token"]) == (rows * padded * 2, rows * (padded + 4))
    assert json.loads(result.stdout)["kv_bytes_per_token"] == narrow["bytes_per_token"]
    assert (bf16["recipe"]["kv_cache_dtype"], codes["recipe"]["kv_cache_dtype"]) == ("bf16", name)
    text = run("inspect", tmp_path / "codes.engine").stdout
    assert f"kv_cache_dtype {name}" in text and f"heads of {wide['head_dim']} as {dtype}, all positions" in text


def test_names_of_kv_caches(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    fp8 = tmp_path / "fp8.engine"
    assert run("build", checkpoint, "--kv-cache-dtype", "fp8", "-o", fp8).exit_code == 0
    for name, same_as in (("auto", engine), ("bfloat16", engine), ("fp8_e4m3", fp8)):
        assert run("build", checkpoint, "--kv_cache_dtype", name, "-o", tmp_path / f"{name}.engine").exit_code == 0
        with EngineFile.open(tmp_path / f"{name}.engine") as file, EngineFile.open(same_as) as same:
            assert file.manifest.content_hash == same.manifest.content_hash
    refused = run("build", checkpoint, "--kv-cache-dtype", "fp8_e5m2", "-o", tmp_path / "x.engine")
    assert refused.exit_code == 2 and "'bf16', 'int8', 'fp8'" in refused.stderr


def test_an_int8_kv_cache_is_in_the_name_of_the_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = json.loads(run("build", checkpoint, "--kv-cache-dtype", "int8", "--json").stdout)
    assert report["path"] == "tiny-llama-bf16-kv-int8.engine"


def test_dumped_graphs_name_weights_and_hold_none(checkpoint: Path, tmp_path: Path) -> None:
    run("build", checkpoint, "-o", tmp_path / "x.engine", "--dump-graphs", tmp_path / "graphs")
    files = sorted((tmp_path / "graphs").iterdir())
    assert files[0].name == "00-imported.onnx" and files[-1].name.endswith("-cleanup.onnx")
    for file in files:
        graph = onnx.load(file, load_external_data=False).graph
        assert graph.node and file.stat().st_size < 200_000


def test_inspect_and_verify(engine: Path) -> None:
    summary = json.loads(run("inspect", engine, "--memory", "1g", "--json").stdout)
    fits = summary["memory"]["sequences_by_length"]["512"]
    kv = fits * 512 * summary["memory"]["kv_bytes_per_token"]
    assert 0.9 * 2**30 < kv + summary["memory"]["weight_bytes"] + summary["memory"]["arena_bytes"] <= 2**30
    text = run("inspect", engine, "--sections").stdout
    assert "weights/model.norm.weight" in text and "sequences of 512 positions" in text
    report = json.loads(run("verify", engine, "--json").stdout)
    assert report["hashes"] == report["goldens"] == "right"


@pytest.mark.parametrize("isa", _cpu.isa_names())
def test_goldens_hold_on_every_instruction_set(engine: Path, isa: str) -> None:
    report = json.loads(run("verify", engine, "--json", "--isa", isa).stdout)
    assert report["isa"] == isa and report["goldens"] == "right"


def test_the_option_for_the_instruction_set_goes_before_the_variable(engine: Path) -> None:
    report = json.loads(run("verify", engine, "--json", ENGINEWRIGHT_CPU_ISA="portable").stdout)
    assert report["isa"] == "portable"
    best = _cpu.isa_names()[0]
    report = json.loads(run("verify", engine, "--json", "--isa", best, ENGINEWRIGHT_CPU_ISA="portable").stdout)
    assert report["isa"] == best


def test_generate_prints_the_answer_alone_on_stdout(engine: Path) -> None:
    result = run("generate", engine, "--prompt", "The", "--max-tokens", "4", "--temperature", "0")
    assert result.exit_code == 0 and result.stderr.startswith("[")
    alone = json.loads(
        run("generate", engine, "--prompt", "The", "--max-tokens", "4", "--temperature", "0", "--json").stdout
    )
    assert result.stdout == alone["text"] + "\n" and len(alone["token_ids"]) <= 4


def test_sampling_follows_the_seed(engine: Path) -> None:
    def text(seed: int) -> str:
        return run("generate", engine, "-c", "Hi", "--max-tokens", "20", "--seed", seed, "--ignore-eos").stdout

    assert text(1) == text(1) != text(2)


def test_a_batch_answers_each_line_in_order(engine: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "The " * n, "id": n, "max_tokens": n, "ignore_eos": True} for n in (5, 1, 3)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("generate", engine, "--input", source, "--output", target)
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(answer["id"], len(answer["token_ids"])) for answer in answers] == [(5, 5), (1, 1), (3, 3)]


def test_export_writes_standard_onnx(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert run("export", checkpoint, "--onnx", path).exit_code == 0
    assert {node.domain for node in onnx.load(path).graph.node} == {""}


# --- What goes wrong, and the exit code of each


def refused(code: int, *arguments: object, **environment: str) -> str:
    result = run(*arguments, **environment)
    assert result.exit_code == code, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr


def test_usage_is_2(engine: Path, tmp_path: Path) -> None:
    assert "Did you mean 'inspect'?" in refused(2, "inspct", engine)
    assert "--max-tokens" in refused(2, "generate", engine, "-p", "x", "--max-tokns", "3")
    assert "one of --prompt" in refused(2, "generate", engine)
    assert "such as 512, 32k" in refused(2, "build", "x", "--max-seq-len", "many")
    assert refused(2, "build", tmp_path / "nothing-here")
    long = refused(2, "generate", engine, "-p", "word " * 600)
    assert "limit of 512" in long
    assert "512 positions" in refused(2, "generate", engine, "-p", "x", "--max-model-len", "1k")
    assert "top_p" in refused(2, "generate", engine, "-p", "x", "--top-p", "1.5")


def test_unsupported_models_are_3(checkpoint: Path, tmp_path: Path) -> None:
    def changed(name: str, **entries: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in checkpoint.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((checkpoint / "config.json").read_text()) | entries
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    output = ("-o", tmp_path / "x.engine")
    assert "Did you mean llama" in refused(3, "build", changed("a", model_type="lama"), *output)
    rope = {"rope_type": "longrope", "rope_theta": 1e4}
    assert "longrope" in refused(3, "build", changed("b", rope_parameters=rope), *output)
    assert "relu" in refused(3, "build", changed("c", hidden_act="relu"), *output)
    pickled = changed("d")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(3, "build", pickled, *output)
    assert not (tmp_path / "x.engine").exists()


def test_broken_checkpoints_are_1(checkpoint: Path, tmp_path: Path) -> None:
    for missing, why in (("tokenizer.json", "tokenizer.json"), ("config.json", "config.json")):
        folder = tmp_path / missing
        folder.mkdir()
        for file in checkpoint.iterdir():
            if file.name != missing:
                (folder / file.name).write_bytes(file.read_bytes())
        result = run("build", folder, "-o", tmp_path / "x.engine")
        assert result.exit_code in (1, 2) and why in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "tokenizer.json"]


def test_too_little_memory_is_4(engine: Path) -> None:
    assert "--kv-cache-memory" in refused(4, "generate", engine, "-p", "x", "--kv-cache-memory", "1k")


def test_damaged_engines_are_5(engine: Path, tmp_path: Path) -> None:
    whole, path = engine.read_bytes(), tmp_path / "cut.engine"
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(5, "generate", path, "-p", "x")
        refused(5, "verify", path)
    with EngineFile.open(engine) as file:
        at = file.offsets["weights/model.norm.weight"]
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "weights/model.norm.weight" in refused(5, "verify", path)


def test_an_engine_that_computes_something_else_is_1(engine: Path, tmp_path: Path) -> None:
    """Hashes fit, and yet it is not what the builder saw: here a norm's weights in another order."""
    name = "weights/model.layers.1.input_layernorm.weight"
    with EngineFile.open(engine) as file:
        weight = np.frombuffer(file.read_section(name), np.float32)
    path = copied(engine, tmp_path / "other.engine", {name: weight[::-1].tobytes()})
    assert "computes something else" in refused(1, "verify", path)
    assert run("verify", path, "--no-goldens").exit_code == 0


def test_an_engine_without_code_for_this_machine_is_6(engine: Path, tmp_path: Path) -> None:
    path = copied(engine, tmp_path / "cuda.engine", {}, targets=("cuda:sm_90a",))
    assert "cuda:sm_90a" in refused(6, "generate", path, "-p", "x")


def test_an_engine_whose_kv_cache_this_release_does_not_have_is_6(engine: Path, tmp_path: Path) -> None:
    with EngineFile.open(engine) as file:
        plan = json.loads(file.read_section("plan/cpu"))
    plan["kv_groups"][0]["dtype"] = "e5m2"
    path = copied(engine, tmp_path / "e5m2.engine", {"plan/cpu": json.dumps(plan).encode()})
    text = refused(6, "generate", path, "-p", "x")
    assert "keeps its KV cache as e5m2: this release has bf16, i8, e4m3" in text and "--kv-cache-dtype" in text


def test_an_instruction_set_that_is_not_there_is_refused(engine: Path) -> None:
    assert "portable" in refused(2, "generate", engine, "-p", "x", ENGINEWRIGHT_CPU_ISA="sse9")
    assert "portable" in refused(2, "generate", engine, "-p", "x", "--isa", "sse9")


def test_settings_of_a_method(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.engine"
    result = run("build", checkpoint, "--quant", "int4-rtn", "--group-size", "64", "--zero-points", "-o", path)
    assert result.exit_code == 0
    with EngineFile.open(path) as file:
        recipe = file.manifest.recipe
    assert (recipe["quant"], recipe["group_size"], recipe["zero_points"]) == ("int4-rtn", 64, True)
    assert run("generate", path, "-p", "x", "--max-tokens", "2").exit_code == 0
    assert "--group-size means nothing to --quant fp8" in refused(
        2, "build", checkpoint, "--quant", "fp8", "--group-size", "64"
    )
    assert "--zero-points" in refused(2, "build", checkpoint, "--quant", "w8a8", "--zero-points")
    result = run("build", checkpoint, "--quant", "fp8", "--fp8-scales", "block", "-o", path)
    assert result.exit_code == 0
    with EngineFile.open(path) as file:
        assert (file.manifest.recipe["quant"], file.manifest.recipe["fp8_scales"]) == ("fp8", "block")
    assert "'tensor', 'channel', 'block'" in refused(2, "build", checkpoint, "--quant", "fp8", "--fp8-scales", "row")
    with pytest.raises(UsageError, match="there are tensor, channel, block"):
        quant_config("fp8", fp8_scales="row")
    with pytest.raises(UsageError, match="--fp8-activations int8 is not known: there are fp8, bf16"):
        quant_config("fp8", fp8_activations="int8")
    assert "--group-size" in refused(2, "build", checkpoint, "--quant", "w8a8", "--group-size", "48")


def test_quant_offers_what_there_is() -> None:
    """The command line names the methods by itself: asking the builder would import torch for `--help`."""
    assert tuple(method.name for method in METHODS) == QUANTS


def test_the_command_starts_without_heavy_imports() -> None:
    code = "import sys, enginewright.cli; print({'numpy', 'torch', 'onnx', 'tokenizers', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
