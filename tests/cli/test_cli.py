"""The `engine` command as people meet it: what it prints, where, and its exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from enginewright import _cpu
from enginewright.cli import hints, main
from enginewright.cli.build import DRAFT_QUANTS
from enginewright.cli.help import SectionCommand, SectionOption, first_sentence
from enginewright.cli.options import QUANTS
from enginewright.dtypes import KV_CACHES
from enginewright.engine_file import EngineFile
from enginewright.errors import UsageError
from enginewright.passes.quant import METHODS, quant_config
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands import inspect
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device import memory_plan
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.step.inputs import StepInputs
from tests.helpers.engines import copied
from tests.helpers.serving import tiny_engine


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(argument) for argument in arguments])


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
    for piece in ("pack the weights", "sha256:", "KiB of weights", f"next     engine generate {path}"):
        assert piece in result.stderr


def test_build_names_its_output_after_model_and_format(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("build", checkpoint, "--json")
    report = json.loads(result.stdout)
    assert report["path"] == "tiny-llama-bf16.engine" and Path(report["path"]).stat().st_size == report["size_bytes"]


@pytest.mark.parametrize("name", [name for name in KV_CACHES if name != "bf16"])
def test_the_kv_cache_is_what_the_build_was_asked_for(
    name: str, checkpoint: Path, engine: Path, tmp_path: Path
) -> None:
    result = run("build", checkpoint, "--kv-cache-dtype", name, "-o", tmp_path / "codes.engine", "--json")
    assert result.exit_code == 0, result.output
    bf16, codes = (json.loads(run("inspect", path, "--json").stdout) for path in (engine, tmp_path / "codes.engine"))
    (wide,), (narrow,) = bf16["kv_groups"], codes["kv_groups"]
    assert (wide["dtype"], narrow["dtype"]) == ("bf16", KV_CACHES[name].name)
    rows = 2 * wide["layers"] * wide["kv_heads"]  # of a token
    padded = -(-wide["head_dim"] // 32) * 32
    kept = padded // 2 + padded // 32 * 4 if name == "int4" else padded + 4
    assert (wide["bytes_per_token"], narrow["bytes_per_token"]) == (rows * padded * 2, rows * kept)
    assert json.loads(result.stdout)["kv_bytes_per_token"] == narrow["bytes_per_token"]
    assert (bf16["recipe"]["kv_cache_dtype"], codes["recipe"]["kv_cache_dtype"]) == ("bf16", name)
    text = run("inspect", tmp_path / "codes.engine").stdout
    assert f"kv_cache_dtype {name}" in text and f"heads of {wide['head_dim']} as {KV_CACHES[name].name}, all" in text


def test_names_of_kv_caches(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    fp8 = tmp_path / "fp8.engine"
    assert run("build", checkpoint, "--kv-cache-dtype", "fp8", "-o", fp8).exit_code == 0
    for name, same_as in (("auto", engine), ("bfloat16", engine), ("fp8_e4m3", fp8)):
        assert run("build", checkpoint, "--kv_cache_dtype", name, "-o", tmp_path / f"{name}.engine").exit_code == 0
        with EngineFile.open(tmp_path / f"{name}.engine") as file, EngineFile.open(same_as) as same:
            assert file.manifest.content_hash == same.manifest.content_hash
    refused = run("build", checkpoint, "--kv-cache-dtype", "fp8_e5m2", "-o", tmp_path / "x.engine")
    assert refused.exit_code == 2 and "'bf16', 'int8', 'fp8', 'int4'" in refused.stderr


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
    assert summary["memory"]["kv_cache_bytes"] >= kv
    text = run("inspect", engine, "--sections").stdout
    assert "weights/model.norm.weight" in text and "sequences of 512 positions" in text
    report = json.loads(run("verify", engine, "--json").stdout)
    assert report["hashes"] == report["goldens"] == "right"


def test_inspect_says_what_run_would_take(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is left, without --memory; with it all, and the option that makes `run` take as much."""
    whole = json.loads(run("inspect", engine, "--json").stdout)["memory"]
    free = whole["weight_bytes"] + whole["arena_bytes"] + (16 << 20)  # too little for all sequences of a batch
    for module in (memory_plan, inspect):
        monkeypatch.setattr(module, "free_memory", lambda: free)
    shown = run("inspect", engine).stdout
    assert f"of the {format_bytes(free)} that are free, `engine run` takes 8.0 MiB for the KV cache" in shown
    given = run("inspect", engine, "--memory", free).stdout
    assert "16.0 MiB are left for the KV cache (`engine run --kv-cache-memory 16m`)" in given
    block_bytes = 32 * whole["kv_bytes_per_token"]
    for limits, kv_cache_bytes in (({}, 8 << 20), ({"kv_cache_memory": "16m"}, 16 << 20)):
        with LLM(engine, **limits) as llm:
            assert 0 <= kv_cache_bytes - llm.memory_plan.kv_bytes < block_bytes


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


def test_export_says_before_the_work_that_there_is_no_folder(tmp_path: Path) -> None:
    assert "there is no folder" in refused(2, "export", "owner/Tiny", "--onnx", tmp_path / "new" / "model.onnx")
    assert list(tmp_path.iterdir()) == []


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


def test_names_of_files_are_escaped_on_the_terminal(engine: Path, tmp_path: Path) -> None:
    """Names in tables and errors add no line, and no control sequence of a terminal."""
    name = "evil\n# HELP x\x1b[31m\x9b"
    for folder, content in ("good", engine.read_bytes()), ("bad", b"nothing"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    good, bad, missing = (tmp_path / folder / name for folder in ("good", "bad", "missing"))
    for code, *words in (
        *((0, *words, good) for words in (("inspect",), ("verify", "--no-goldens"), ("doctor",))),
        (0, "diff", good, good),
        (0, "generate", good, "-p", "x", "--max-tokens", "1"),
        *((5, *words, bad) for words in (("inspect",), ("verify",), ("diff", good), ("generate", "-p", "x"))),
        *((2, *words, missing) for words in (("inspect",), ("generate", "-p", "x"), ("run",))),
        (2, "inspect", good, "--memory", name),
        (2, "sign", missing, "--key", missing),
    ):
        result = run(*words)
        assert result.exit_code == code, (words, result.output)
        shown = result.stderr if words[0] == "generate" else result.output
        assert r"evil\n# HELP x\x1b[31m\x9b" in shown, words
        assert all(line.isprintable() and not line.startswith("#") for line in shown.splitlines()), (words, shown)


def test_usage_is_2(engine: Path, tmp_path: Path) -> None:
    assert "Did you mean 'inspect'?" in refused(2, "inspct", engine)
    assert "--max-tokens" in refused(2, "generate", engine, "-p", "x", "--max-tokns", "3")
    assert "one of --prompt" in refused(2, "generate", engine)
    assert "32k and 2g are accepted" in refused(2, "build", "x", "--max-seq-len", "many")
    assert refused(2, "build", tmp_path / "nothing-here")
    long = refused(2, "generate", engine, "-p", "word " * 600)
    assert "context length is 512" in long
    assert "512 positions" in refused(2, "generate", engine, "-p", "x", "--max-model-len", "1k")
    assert "top_p" in refused(2, "generate", engine, "-p", "x", "--top-p", "1.5")


def test_options_of_generate_that_would_do_nothing_are_2(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    assert "--system goes with --chat" in refused(2, "generate", engine, "-p", "x", "--system", "y")
    assert '"messages"' in refused(2, "generate", engine, "--input", tmp_path / "in.jsonl", "--system", "y")
    assert "--logprobs needs --json" in refused(2, "generate", engine, "-c", "x", "--logprobs", "2")
    assert "--output goes with --input" in refused(2, "generate", engine, "-c", "x", "-o", tmp_path / "out")
    found = json.loads(run("generate", engine, "-p", "x", "--logprobs", "2", "--max-tokens", "1", "--json").stdout)
    assert len(found["logprobs"][0]["top"]) == 2


def test_a_prompt_without_a_limit_stops_somewhere_and_says_so(engine: Path) -> None:
    note = "[stopped at 256 tokens, the limit of --prompt without --max-tokens: --max-tokens N sets another]"
    generate = ("generate", engine, "--ignore-eos", "--json")
    for options, tokens, positions, noted in (
        (("-p", "x"), 256, None, True),
        (("-p", "x", "--max-tokens", "256"), 256, None, False),
        (("-p", "x", "--max-model-len", "40"), None, 40, False),
        (("-c", "x"), None, 512, False),  # a chat's answer ends by itself, or at the model's length
    ):
        result = run(*generate, *options)
        found = json.loads(result.stdout)
        count = len(found["token_ids"])
        assert tokens in (None, count) and positions in (None, count + found["num_prompt_tokens"])
        assert (note in result.stderr) == noted, result.stderr
    assert note in run("generate", engine, "--ignore-eos", "-p", "x").stderr


def test_variables_of_the_chat_template() -> None:
    engine = tiny_engine("thinks")

    def prompt_tokens(*options: str) -> int:
        result = run("generate", engine, "-c", "Hello", "--max-tokens", "1", "--json", *options)
        return int(json.loads(result.stdout)["num_prompt_tokens"])

    assert prompt_tokens("--chat-template-kwargs", '{"enable_thinking": false}') > prompt_tokens()
    for given, why in (("[1]", "no JSON object"), ("{", "no JSON"), ('{"messages": []}', "cannot set messages")):
        assert why in refused(2, "generate", engine, "-c", "x", "--chat-template-kwargs", given)
    assert "goes with --chat" in refused(2, "generate", engine, "-p", "x", "--chat-template-kwargs", "{}")


def test_a_checkpoint_is_said_to_be_built_first(checkpoint: Path, tmp_path: Path) -> None:
    """Every command that opens an engine refuses a checkpoint, with the command that builds it."""
    gguf = tmp_path / "Some Model.Q4_0.gguf"
    gguf.write_bytes(b"GGUF")
    for given, name in (("owner/Tiny-1B", "Tiny-1B"), (checkpoint, "tiny-llama"), (gguf, "Some Model.Q4_0")):
        command = shlex.join(["engine", "build", str(given), "--output", f"{name}.engine"])
        for words in (("inspect",), ("verify",), ("bench", "offline"), ("bench", "profile"), ("diff", given)):
            assert f"Run: {command}\n" in refused(2, *words, given)
        assert f"Run: {command}\n" in refused(2, "generate", given, "-p", "x")
        with pytest.raises(UsageError, match=r"build it first|has to be built first"):
            LLM(given)


@pytest.mark.parametrize(
    "words", ["run", "chat", "inspect", "verify", "generate -p x", "bench offline", "bench profile"]
)
def test_an_engine_that_is_not_there_is_2(words: str, tmp_path: Path) -> None:
    """A name in the form of a path is one, and never taken for a model of the hub."""
    for path in ("nothing.engine", tmp_path / "x" / "y", "owner/tiny.engine", "./x/y", "../x/y", "~/x/y"):
        assert refused(2, *words.split(), path) == f"engine: {path} cannot be opened: there is no such file\n"
    for path in ("nothing.engine", "./x/y"):
        with pytest.raises(UsageError, match="there is no such file"):
            LLM(path)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("serve a.engine --port 80", "engine run a.engine --port 80"),
        ("chat a.engine Hi --seed 1", "engine generate a.engine --chat Hi"),
        ("ask a.engine Hi --seed 1", "engine generate a.engine --chat Hi --seed 1"),
        ("ask a.engine --seed 1", "engine generate a.engine --chat QUESTION --seed 1"),
        ("complete a.engine Once", "engine generate a.engine --prompt Once"),
        ("ask", "engine generate ENGINE --chat QUESTION"),
        ("quantize owner/Tiny", "engine build owner/Tiny"),
        ("generate a.engine What is it?", "engine generate a.engine --chat 'What is it?'"),
        ("bench a.engine --threads 1", "engine bench offline a.engine --threads 1"),
        ("bench folder/a --threads 1", "engine bench offline folder/a --threads 1"),
    ],
)
def test_commands_of_other_programs_are_answered_with_ours(typed: str, meant: str) -> None:
    assert f"Did you mean: {meant}\n" in refused(2, *typed.split())


def test_no_command_that_is_near() -> None:
    assert "No such command 'frobnicate'.\n" in refused(2, "frobnicate")
    assert "Did you mean 'serve'?" in refused(2, "bench", "servr")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("int4", "int4-awq (calibrated, the more exact) or int4-rtn (rounded to nearest, built in seconds)"),
        ("Q4_K_M", "int4-awq (calibrated, the more exact) or int4-rtn (rounded to nearest, built in seconds)"),
        ("q8_0", "int8-wo (8-bit weights) or w8a8 (8-bit activations, too)"),
        ("int8", "int8-wo (8-bit weights) or w8a8 (8-bit activations, too)"),
        ("awq", "int4-awq"),
        ("gptq", "int4-gptq"),
        ("nf4", "int4-rtn"),
        ("fp4", "mxfp4"),
        ("nvfp4", "mxfp4"),
        ("smoothquant", "int8-sq"),
        ("q5_k_m", "auto with --bits, which gives each layer a format of 4, 8 or 16 bits"),
        ("fp16", "bf16"),
        ("fp8_e4m3", "fp8"),
        ("int8-woo", "int8-wo (8-bit weights) or w8a8 (8-bit activations, too)"),
        ("w8a9", "w8a8"),
    ],
)
def test_formats_of_other_programs_are_answered_with_ours(typed: str, meant: str) -> None:
    assert f"Did you mean {meant}?\n" in refused(2, "build", "x", "--quant", typed)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (
            "run x --tensor-paralel-size 2",
            "(Did you mean one of: '--pipeline-parallel-size', '--tensor-parallel-size'?)",
        ),
        ("run x -dp 2", "Run several servers behind engine route."),
        (
            "run x --enable-expert-parallel",
            "--tensor-parallel-size divides layers of experts by experts: leave it out.",
        ),
        ("run x --node-rank 0", "This machine is node 0; the others run engine worker with --node-rank."),
        ("run x --headless", "This machine is node 0; the others run engine worker with --node-rank."),
        ("bench offline x --split-mode row", "Ranks get equal parts: --tensor-parallel-size."),
        ("generate x -ngl 99 -p x", "An engine runs on one device as a whole: --device cuda."),
        ("run x --gpu-memory-utilization 0.9", "Set the memory of the KV cache: --kv-cache-memory 8GiB."),
        ("run x --dtype auto", "Formats are chosen when the engine is built: engine build MODEL --quant METHOD."),
        ("build x --max-num-seqs 3", "The batch size is an option of engine run: --max-num-seqs."),
        ("build x --max-model-len 3", "The longest sequence of an engine is set by engine build --max-seq-len."),
        ("generate x --temp 1", "Write --temperature."),
        ("run x --enable-lora", "Name adapters: --lora-modules NAME=FILE or --lora-dir DIR."),
        (
            "bench offline x --speculative-config {}",
            "Add the draft model with engine build --draft, and choose it with --speculate.",
        ),
        ("run x --max-num-seq 3", "(Did you mean one of: '--max-cpu-loras', '--max-num-seqs', '--max-num-waiting'?)"),
    ],
)
def test_options_of_other_programs_are_answered_with_what_to_do(typed: str, answer: str) -> None:
    assert refused(2, *typed.split()).endswith(f" {answer}\n")


def test_hints_name_options_that_exist() -> None:
    known = {option for _, command in commands() for parameter in command.params for option in parameter.opts}
    for name, hint in hints.OPTIONS.items():
        for option in re.findall(r"--[a-z-]+", hint):
            assert option in known, (name, option)


@pytest.mark.parametrize("target", ["gpu", "GPU", "cuda", "cuda:", "cpu+gpu", "nvidia"])
def test_a_gpu_without_its_architecture(target: str) -> None:
    text = " ".join(refused(2, "build", "x", "--target", target).split())
    assert "Name the GPU's architecture: cuda:sm_80 (A100)" in text and "mean" not in text


def test_help_is_a_command() -> None:
    for words in ((), ("build",), ("bench",), ("bench", "serve")):
        assert run("help", *words).stdout == run(*words, "--help").stdout
    assert "Did you mean 'build'?" in refused(2, "help", "biuld")
    assert "run has no commands of its own" in refused(2, "help", "run", "x")


@pytest.mark.parametrize("group", [(), ("bench",)])
def test_lists_of_commands_are_not_cut_short(group: tuple[str, ...]) -> None:
    text = run(*group, "--help").stdout
    listed = " ".join(text.partition("Commands:")[2].split())
    for words, command in commands():
        if words[:-1] == group:
            assert first_sentence(command.help or "") in listed and "..." not in listed


def test_a_format_that_nothing_is_like() -> None:
    assert refused(2, "build", "x", "--quant", "zzz").endswith(f"'{METHODS[-1].info.name}'.\n")


def test_more_threads_than_cores_are_warned_of(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    cores = num_cores()
    generate = ("generate", engine, "-p", "x", "--max-tokens", "1")

    def warned(*options: object, **environment: str) -> bool:
        caplog.clear()
        assert run(*generate, *options, **environment).exit_code == 0
        return f"{cores + 3} threads share {cores} core" in caplog.text

    assert warned("--threads", cores + 3)
    assert warned(ENGINEWRIGHT_NUM_THREADS=str(cores + 3))
    assert not warned("--threads", cores) and not caplog.text
    with LLM(engine, threads=cores + 3):
        assert f"Use --threads {cores}" in caplog.text


def test_a_warning_is_on_stderr(engine: Path) -> None:
    """Nothing sets up logging for `generate`."""
    command = [sys.executable, "-c", "from enginewright.cli import main; main()", "generate", str(engine), "-p", "x"]
    done = subprocess.run([*command, "--max-tokens", "1", "--threads", "99"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith("99 threads share ") and "threads share" not in done.stdout


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
    rope = {"rope_type": "ntk", "rope_theta": 1e4}
    assert "ntk" in refused(3, "build", changed("b", rope_parameters=rope), *output)
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


def test_too_little_memory_is_4(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--kv-cache-memory" in refused(4, "generate", engine, "-p", "x", "--kv-cache-memory", "1k")
    monkeypatch.setattr(memory_plan, "free_memory", lambda: 1000)
    said = refused(4, "generate", engine, "-p", "x", "--kv-cache-memory", "8m", "--no-mmap")
    assert "Leave out --no-mmap" in said


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


@pytest.mark.parametrize("output", [["--json"], []], ids=["json", "text"])
def test_an_engine_that_is_changed_under_a_running_answer_is_5(
    engine: Path, tmp_path: Path, output: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(engine, tmp_path / "changed.engine", {})
    step, left = CpuExecutor.run, 3

    def run_and_change(executor: CpuExecutor, inputs: StepInputs) -> np.ndarray:
        nonlocal left
        left -= 1
        if left == 0:
            os.truncate(path, path.stat().st_size - 64)
        return step(executor, inputs)

    monkeypatch.setattr(CpuExecutor, "run", run_and_change)
    result = run("generate", path, "-p", "x", "--ignore-eos", "--max-tokens", "20", *output)
    assert result.exit_code == 5, result.output
    assert f"engine: the engine has failed: {path} was changed while it is in use: it was cut short" in result.stderr
    assert "--no-mmap" in result.stderr and "Traceback" not in result.output + caplog.text


def test_weights_are_hashed_before_they_are_used_if_asked_for(engine: Path, tmp_path: Path) -> None:
    name = "weights/model.norm.weight"
    with EngineFile.open(engine) as file:
        at = file.offsets[name]
    path, data = tmp_path / "damaged.engine", bytearray(engine.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert run("generate", path, "-p", "x", "--max-tokens", "1").exit_code == 0
    assert name in refused(5, "generate", path, "-p", "x", "--max-tokens", "1", "--verify")
    assert run("generate", engine, "-p", "x", "--max-tokens", "1", "--verify").exit_code == 0


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
    plan["caches"][0]["planes"][0]["dtype"] = "f64"
    path = copied(engine, tmp_path / "f64.engine", {"plan/cpu": json.dumps(plan).encode()})
    text = refused(6, "generate", path, "-p", "x")
    assert "keeps its KV cache as f64: this release has bf16, i8, e4m3" in text and "--kv-cache-dtype" in text


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
    assert tuple(method.info.name for method in METHODS) == QUANTS
    assert tuple(method.info.name for method in METHODS if not method.info.calibrated) == DRAFT_QUANTS


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is no group, with the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("words", "command"), [pytest.param(*entry, id=" ".join(entry[0])) for entry in commands()])
def test_help_has_each_option_in_a_section_and_with_its_default(words: tuple[str, ...], command: click.Command) -> None:
    text = " ".join(run(*words, "--help").stdout.split())
    assert isinstance(command, SectionCommand)
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        assert isinstance(option, SectionOption) and f" {option.section}: " in text, option.name
        assert option.help and option.help.endswith("."), option.name
        _, shown = option.get_help_record(click.Context(command)) or ("", "")
        is_switch = option.is_flag and not option.secondary_opts
        assert is_switch or option.required or re.search(r"\[default: [^;\]]", shown), option.name


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("build", ["Model", "Format", "Calibration", "Targets", "Quality gate", "Output", "Other"]),
        (
            "run",
            [
                "Model",
                "Address",
                "Overload",
                "Limits",
                "KV cache",
                "Speculation",
                "Machine",
                "Several machines",
                "Several engines",
                "Adapters",
                "Operation",
                "KV events",
                "Prefill and decode apart",
                "Shared KV cache",
                "Keys",
                "Log",
                "Other",
            ],
        ),
        (
            "chat",
            [
                "Prompt",
                "Sampling",
                "Output",
                "Limits",
                "KV cache",
                "Speculation",
                "Machine",
                "Several machines",
                "Other",
            ],
        ),
        ("worker", ["Several machines", "Machine", "Log", "Other"]),
        (
            "generate",
            [
                "Prompt",
                "Sampling",
                "Structure of the answer",
                "Output",
                "Limits",
                "KV cache",
                "Speculation",
                "Machine",
                "Several machines",
                "Other",
            ],
        ),
    ],
)
def test_sections_of_help(command: str, sections: list[str]) -> None:
    assert re.findall(r"^([A-Z][A-Za-z ]+):$", run(command, "--help").stdout, re.M) == sections


def test_the_command_starts_without_heavy_imports() -> None:
    code = "import sys, enginewright.cli; print({'numpy', 'torch', 'onnx', 'tokenizers', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
