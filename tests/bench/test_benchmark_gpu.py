"""`python -m benchmarks.gpu` where there is no GPU: its page, its processes, and its kernel calls in emulation."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, gemm, kernels, large, machine, models, roofline, sanitizer
from benchmarks.gpu.bench import Replay, copies, interleaved, ratio
from benchmarks.gpu.page import AIMS, all_done, page
from benchmarks.gpu.parts import DONE, FAILED, PARTS, ROOT, STOPPED, Result, environment, run_part
from benchmarks.gpu.report import Report, read_report
from enginewright.builder.cuda import compile_each
from tests.emulator.bench import ROOFLINE, EmulatedBench
from tests.helpers.gpu_report import reported

RESULTS = ROOT / "benchmarks/results"
SIZES = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


# The page


def test_the_page_is_what_its_results_give() -> None:
    file = RESULTS / "gpu.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    assert (RESULTS / "gpu.md").read_text() == page(results)


def test_without_results_nothing_is_claimed() -> None:
    lines = page({}).splitlines()
    assert sum("| not run |" in line for line in lines) == len(AIMS) + len(PARTS)
    assert not any(line.endswith(("| yes |", "| no |")) for line in lines)


def results_of(**parts: tuple[str, list[dict[str, object]]]) -> dict[str, object]:
    made = {
        name: {"status": status, "seconds": 3.5, "figures": figures, "date": "2026-11-21", "why": ""}
        for name, (status, figures) in parts.items()
    }
    return {"machine": {"GPU": "NVIDIA H200"}, "parts": made}


def test_the_page_of_results() -> None:
    def int4(tokens: int, ratio: float, **more: str) -> dict[str, object]:
        return {"name": f"gemm/o/{tokens}/int4", "over cublas": ratio, "seconds": 1e-5, **more}

    figures = [int4(1, 3.9), int4(8, 3.4), int4(16, 9.0, error="it is off | by 1")]
    decode = {"name": "models/bf16/decode-1", "of the memory roofline": 0.75, "between kernels": 41e-6}
    results = results_of(gemm=(DONE, figures), models=(STOPPED, [decode]))
    text = page(results)
    assert (
        "| INT4 weights, up to 16 tokens, over cuBLAS BF16 | ≥ 3.5 × | 3.65 × (3.40 × to 3.90 × in 2 cases) | yes |"
        in text
    )
    assert "| ≥ 80 % | 75 % | no |" in text and "| < 50 µs | 41 µs | yes |" in text
    assert "| gemm/o/16/int4 | it is off \\| by 1 |" in text
    assert "| `models` | A model of the 1B shape | stopped at its limit | 2026-11-21 | 3.5 |" in text
    assert "FlashInfer | ≥ 1.5 × | not run | |" in text
    assert not all_done(results)
    assert all_done(results_of(gemm=(DONE, figures[:2])))
    assert not all_done(results_of(gemm=(DONE, figures)))
    absent = results_of(attention=(DONE, [{"name": "attention/decode/1x1024/flashinfer", "not run": "No module"}]))
    assert "| attention/decode/1x1024/flashinfer | No module |" in page(absent) and all_done(absent)


# Parts and the command


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ("report.add('b', y=report.settings['y'])", DONE, ""),
        ("raise ValueError('no such thing')", FAILED, "ValueError: no such thing"),
        ("import subprocess, time; subprocess.Popen(['sleep', '60']); print('slow'); time.sleep(60)", STOPPED, "slow"),
    ],
)
def test_a_part_ends_and_what_it_found_is_kept(body: str, status: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "fake_part.py").write_text(f"def run(report):\n    report.add('a', x=1.2345678)\n    {body}\n")
    begin = time.monotonic()
    result = run_part("fake_part", 2.0, tmp_path, {"y": 7}, tmp_path / "log")
    assert time.monotonic() - begin < 20
    assert (result.status, result.why) == (status, why)
    assert result.figures == [{"name": "a", "x": 1.2346}, *([{"name": "b", "y": 7}] if status == DONE else [])]
    assert "==== fake_part\n" in (tmp_path / "log").read_text()


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none") == []
    Report(tmp_path / "some").add("a", values=[1 / 3, {"b": 2 / 3}])
    with (tmp_path / "some").open("a") as file:
        file.write('{"name": "b", "x"')
    assert read_report(tmp_path / "some") == [{"name": "a", "values": [0.33333, {"b": 0.66667}]}]


def test_what_fails_is_one_error(tmp_path: Path) -> None:
    report = Report(tmp_path / "some")
    with report.case("a"):
        report.add("a/1", x=1)
        raise ValueError("no such thing")
    report.add("b", x=2)
    assert [(one["name"], one.get("error")) for one in read_report(tmp_path / "some")] == [
        ("a/1", None),
        ("a", "ValueError: no such thing"),
        ("b", None),
    ]


def test_without_a_gpu_it_ends_with_6(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 6, found.stderr
    assert "there is no GPU here" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.missing() == []
    needed = {"numpy": "numpy", "none_such": "none-such", "none.such": "another"}
    assert machine.missing(needed) == ["none-such", "another"]
    monkeypatch.setattr(machine, "NVRTC", ("numpy", "13.0."))
    assert machine.missing({}) == ["numpy==13.0.*"]
    monkeypatch.setattr(command, "missing", lambda: ["msgspec"])
    assert command.main([]) == 2
    assert "this Python lacks msgspec\nBring them along: pip install --target FOLDER" in capsys.readouterr().err
    assert command.main(["--site", "/none"]) == 2


def test_packages_of_a_folder_come_after_ours(tmp_path: Path) -> None:
    paths = environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert paths[:4] == [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks"), str(tmp_path)]
    before = os.environ.get("LD_LIBRARY_PATH")
    assert environment(tmp_path).get("LD_LIBRARY_PATH") == before
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    libraries = environment(tmp_path)["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries == [str(tmp_path / "nvidia/cu13/lib"), *filter(None, [before])]


def test_parts_are_run_in_turn_until_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, float]] = []

    def fake(module: str, limit_s: float, *_: object) -> Result:
        ran.append((module, limit_s))
        if len(ran) == 3:
            now[0] += 400
        return Result(DONE, 1.0, [{"name": "roofline", "error": "x"}] if len(ran) == 1 else [], "2026-11-21")

    now = [0.0]
    monkeypatch.setattr(command, "run_part", fake)
    monkeypatch.setattr(command, "facts", lambda: {"GPU": "none"})
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    given = command.parsed(["--limit", "410", "--output", str(tmp_path)])
    assert command.measure(given, 0.0) == 1
    assert [module for module, _ in ran] == [f"benchmarks.gpu.{part.name}" for part in PARTS[:3]]
    assert [limit for _, limit in ran] == [part.limit_s for part in PARTS[:3]]
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["status"] for part in results["parts"].values()] == [DONE] * 3 + ["not run"] * 5
    assert (tmp_path / "gpu.md").read_text() == page(results)
    now[0] = 0.0
    assert command.measure(command.parsed(["--parts", "roofline", "--add", "--output", str(tmp_path)]), 0.0) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"].keys() == results["parts"].keys()


# Tests on the GPU


def test_outcomes_of_tests(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b[1]"><failure message="assert 1 == 2&#10;more"/>'
        '</testcase><testcase name="c"><error message=""/></testcase></testsuite></testsuites>'
    )
    assert kernels.outcomes(tmp_path / "x.xml") == {
        "tests": 3,
        "failed": 2,
        "error": "b[1]: assert 1 == 2",
        "failures": ["b[1]: assert 1 == 2", "c: no message"],
    }
    (tmp_path / "x.xml").write_text('<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>')
    assert kernels.outcomes(tmp_path / "x.xml") == {"tests": 1, "failed": 0}
    (tmp_path / "x.xml").write_text("<testsuites/>")
    assert kernels.outcomes(tmp_path / "x.xml")["error"] == "no test ran"


def test_what_never_ends_is_ended(tmp_path: Path) -> None:
    process = kernels.begun([sys.executable, "-uc", "import time; print('begun'); time.sleep(60)"], tmp_path / "log")
    while not (tmp_path / "log").read_text():
        assert process.poll() is None
    assert kernels.text_at_end(process, tmp_path / "log", time.monotonic()) == "begun\n"
    assert process.returncode == -9


def test_files_with_tests_on_a_gpu() -> None:
    assert {"test_gemm.py", "test_attention.py", "test_engine.py"} <= {path.name for path in kernels.files()}
    assert all(path.exists() for path in kernels.files())


def test_some_tests_of_each_file_are_sanitized() -> None:
    listed = "tests/a.py::x\ntests/a.py::y\ntests/a.py::z[1::2]\ntests/b.py::x\n\n4 tests collected in 0.1s\n"
    assert sanitizer.some(listed, 2) == ["tests/a.py::x", "tests/a.py::z[1::2]", "tests/b.py::x"]
    assert sanitizer.summary("========= ERROR SUMMARY: 3 errors\n") == 3
    assert sanitizer.summary("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == 0
    assert sanitizer.summary("killed") is None


# Kernel calls


def test_rounds_go_through_all() -> None:
    order: list[str] = []

    def replay(name: str) -> Replay:
        return Replay(lambda: order.append(name), [])

    found = interleaved(EmulatedBench(), {"a": replay("a"), "b": replay("b")}, rounds=2)
    assert order == ["a", "b"] * 3 and {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}
    assert ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0
    assert copies(EmulatedBench(), 999) == 4 and copies(EmulatedBench(), 10**6) == 1


def test_a_streaming_read_reads_everything() -> None:
    bench, lines, rows = EmulatedBench(), 5, 3331
    x = torch.randint(0, 256, (16 * lines * rows,), dtype=torch.uint8)
    sums: list[torch.Tensor] = []
    empty = torch.empty

    def watched(*given: object, **named: object) -> torch.Tensor:
        sums.append(empty(*given, **named))
        return sums[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched)
        roofline.read_work(bench, x, lines)
    (found,) = sums
    expected = int(x.numpy().view(np.uint32).sum(dtype=np.uint64)) & 0xFFFFFFFF
    assert int(found.numpy().view(np.uint32).sum(dtype=np.uint64)) & 0xFFFFFFFF == expected


PRODUCTS: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
    (("bf16", "int4"), (1, 7)),
    (("w8a8",), (1, 7)),
    (("fp8a8", "fp8a8 blocks"), (1, 7)),
    (("bf16", "bf16 wgmma"), (66,)),
    (("fp8a8", "fp8a8 wgmma"), (66,)),
]
SOME_PRODUCTS = [PRODUCTS[0], PRODUCTS[4]]


@pytest.mark.parametrize(("names", "counts"), SOME_PRODUCTS)
def test_matrix_products_are_called_as_engines_call_them(
    names: tuple[str, ...], counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = gemm.Shape("gate_up", 64, 128, gated=True, max_tokens=counts[-1])
    monkeypatch.setattr(gemm, "TOKENS", counts)
    monkeypatch.setattr(gemm, "SHAPES", [shape])
    formats = [format for format in (*gemm.FORMATS, *gemm.HOPPER) if format.name in names]
    bench = EmulatedBench()

    def measure(report: Report) -> None:
        ((prepared, calls),) = gemm.prepared(bench, report, formats)
        gemm.measure(bench, report, ROOFLINE, prepared, calls)

    found = reported(tmp_path, measure)
    for name in (*names, gemm.CUBLAS):
        for tokens in counts:
            figure = found[f"gemm/gate_up/{tokens}/{name}"]
            assert "error" not in figure and figure["over cublas"] == 1.0 and figure["of the matmul roofline"] > 0
            assert ("over mma.sync" in figure) == name.endswith("wgmma")


def test_a_wrong_product_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gemm.Shape("gate_up", 64, 128, gated=True, max_tokens=9)
    monkeypatch.setattr(gemm, "TOKENS", (7,))
    monkeypatch.setattr(gemm, "r16", lambda weight, gated: weight.view(torch.uint8).flatten())
    bench, call = EmulatedBench(), gemm.FORMATS[0].call(shape, "sm_90a")
    bench.compile(gemm.kernels_of(shape, call))
    found = reported(tmp_path, lambda report: gemm.measure(bench, report, ROOFLINE, shape, {gemm.FORMATS[0]: call}))
    assert "it is off by" in str(found["gemm/gate_up/7/bf16"]["error"])


@pytest.mark.parametrize("tokens", [9])  # tests/long has a decode
def test_attention_is_called_as_engines_call_it(tokens: int, tmp_path: Path) -> None:
    kinds = ("bf16", "i8") if tokens == 1 else ("bf16", attention.WGMMA)
    bench, calls = EmulatedBench(), {kv: attention.attention_call(kv) for kv in kinds}
    problem = attention.Problem("bf16", 2 if tokens == 1 else 1, 69 if tokens == 1 else tokens, tokens)
    bench.compile(kernel for call in calls.values() for kernel in call.instances(problem.sizes))
    found = reported(tmp_path, lambda report: attention.measure(bench, report, ROOFLINE, problem, calls))
    kind = "decode/2x69" if tokens == 1 else "prefill/1x9"
    for kv in calls:
        figure = found[f"attention/{kind}/{kv}"]
        assert "error" not in figure, figure
        assert figure["seconds"] == 1e-3 and ("over mma.sync" in figure) == (kv == attention.WGMMA)
    only = list(calls)[-1]
    (tmp_path / "report").unlink()
    one = reported(tmp_path, lambda report: attention.measure(bench, report, ROOFLINE, problem, calls, only))
    assert [name for name, figure in one.items() if "not run" not in figure] == [f"attention/{kind}/{only}"]


def test_all_calls_are_there_and_compile_for_an_h200() -> None:
    """One of each kernel; the rest differ in numbers."""
    calls = {(shape, format): format.call(shape, "sm_90a") for shape in gemm.SHAPES for format in gemm.FORMATS}
    some = [call.instances(gemm.sizes_of(4096))[0] for (shape, _), call in calls.items() if shape.name == "qkv"][:1]
    for format in gemm.FORMATS:
        if format.name in ("int4", "fp8a8"):
            some += calls[gemm.SHAPES[0], format].instances(gemm.sizes_of(8))
    some += attention.attention_call("i8").instances(attention.Problem("i8", 8, 4096).sizes)
    some += attention.attention_call(attention.WGMMA).instances(attention.Problem("bf16", 1, 99, 99).sizes)
    some += roofline.read_call().instances(gemm.sizes_of(1))
    made = compile_each([("sm_90a", kernel) for kernel in some], 2)
    assert all(compiled.local_bytes == 0 for compiled in made.values())
    assert all(call.launches for call in calls.values())


# Models


def test_models_of_random_weights_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "BATCHES", (1, 3))
    monkeypatch.setattr(models, "PROMPTS", (40,))
    invariant = models.invariant("bf16")
    limits = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    subjects = {}
    for name in ("bf16", invariant):
        path = tmp_path / f"{name}.engine"
        assert models.build("bf16", path, ("cpu",), SIZES, "cpu", batch_invariant=name == invariant) > 0
        subjects[name] = models.Subject.open(path, "cpu", **limits)
    subject = subjects["bf16"]
    table = 307 * 64
    assert subject.step_bytes >= 2 * (models.body_weights(SIZES) + table)
    found = reported(tmp_path, lambda report: models.measure(report, ROOFLINE, subjects, SIZES, steps=5, rounds=1))
    assert found.keys() == {f"models/{name}" for name in ("bf16/decode-1", "bf16/decode-3", "bf16/prefill-40")} | {
        f"models/{invariant}/prefill-40"
    }
    assert all(figure["tokens per s"] > 0 for figure in found.values())
    assert found["models/bf16/prefill-40"]["over batch-invariant"] > 0
    for one in subjects.values():
        one.llm.close()


def test_throughput_of_a_large_model_is_measured(tmp_path: Path) -> None:
    path, work = tmp_path / "x.engine", large.Work(requests=3, prompt=9, answer=5)
    models.build("fp8", path, ("cpu",), SIZES, "cpu", kv_cache_dtype="fp8")
    found = reported(tmp_path, lambda report: large.measure(report, ROOFLINE, path, "cpu", SIZES, work))
    assert found["large/fp8/3x9x5"]["tokens per s"] > 0 and 0 < found["large/fp8/3x9x5"]["of the roofline"] < 1
    # Four steps: reading 100 bytes and what 3 x 10 to 13 positions take, as long as multiplying takes no longer.
    slow_memory, slow_cores = roofline.Roofline(1.0, 1.0, 1e30), roofline.Roofline(1e30, 1e30, 0.5)
    assert work.roofline_seconds(slow_memory, SIZES, 100, 7) == pytest.approx(4 * 100 + 7 * 3 * (10 + 11 + 12 + 13))
    body, head = models.body_weights(SIZES), 307 * 64
    assert work.roofline_seconds(slow_cores, SIZES, 100, 7) == 2 * 3 * (9 * body + 4 * (body + head))
