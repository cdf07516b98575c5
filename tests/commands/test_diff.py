"""`engine diff`: each thing that may tell two engines apart is found, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.manifest import About
from enginewright.passes.quant import W8A8, Bf16
from enginewright.runtime.commands.diff import compare
from enginewright.runtime.commands.goldens import GOLDENS, Golden, Goldens
from enginewright.runtime.commands.quality import QUALITY, QualityReport
from tests.helpers.command import run_engine
from tests.helpers.engines import copied
from tests.helpers.tiny import MemoryCheckpoint

PARTS = ("about", "recipe", "sources", "sizes", "kernels", "sections", "evidence")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one model: twice the same, and built otherwise."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint = MemoryCheckpoint.tiny("llama")
    for name, build in (
        ("bf16", BuildConfig()),
        ("again", BuildConfig()),
        ("w8a8", BuildConfig(quant=W8A8())),
        ("kv", BuildConfig(kv_cache_dtype="int8")),
        ("short", BuildConfig(quant=Bf16(), max_seq_len=64, max_batch_size=3)),
    ):
        build_engine(checkpoint, build, folder / name)
    return folder


def found(a: Path, b: Path) -> dict[str, Any]:
    """The parts in which they differ; the other way round, the same with the values exchanged."""
    report, back = compare(a, b), compare(b, a)
    for part in ("about", "recipe", "sources", "sizes", "kernels"):
        assert back[part] == {name: values[::-1] for name, values in report[part].items()}
    assert report["same"] == back["same"] == (report["content_hash"][0] == report["content_hash"][1])
    return {part: report[part] for part in PARTS if report[part]}


def with_goldens(path: Path, goldens: Goldens, to: Path) -> Path:
    return copied(path, to, {GOLDENS: goldens.to_json()})


def test_the_same_content_is_0(folder: Path) -> None:
    assert found(folder / "bf16", folder / "again") == {}
    result = run_engine("diff", folder / "bf16", folder / "again")
    assert result.exit_code == 0 and "content   the same: sha256:" in result.stdout
    assert json.loads(run_engine("diff", folder / "bf16", folder / "again", "--json").stdout)["same"] is True


def test_another_format(folder: Path) -> None:
    parts = found(folder / "bf16", folder / "w8a8")
    assert set(parts) == {"recipe", "sizes", "kernels", "sections", "evidence"}
    assert parts["recipe"] == {"quant": ["bf16", "w8a8"], "group_size": [None, 32]}
    assert parts["kernels"]["cpu.gemm_bf16@1"] == [13, None] and parts["kernels"]["cpu.gemm_w8a8@1"] == [None, 13]
    changed = parts["sections"]["weights/model.layers.1.self_attn.qkv_proj.weight"]
    assert changed["dtype"] == ["bf16", "i8"] and set(changed) == {"dtype", "nbytes", "sha256"}
    added = parts["sections"]["weights/model.layers.1.self_attn.qkv_proj.weight.scale"]
    assert (added["only_in"], added["dtype"], added["shape"]) == ("b", "f32", (96,))
    assert "weights/model.norm.weight" not in parts["sections"]
    with EngineFile.open(folder / "bf16") as bf16, EngineFile.open(folder / "w8a8") as w8a8:
        assert parts["sizes"]["file_bytes"] == [bf16.file_bytes, w8a8.file_bytes]
        for name in {*bf16.sections, *w8a8.sections}:
            same = bf16.sections.get(name) == w8a8.sections.get(name)
            assert same == (name not in parts["sections"] and name not in parts["evidence"])
    text = run_engine("diff", folder / "bf16", folder / "w8a8").stdout
    assert run_engine("diff", folder / "bf16", folder / "w8a8").exit_code == 1
    assert "recipe    quant bf16 → w8a8" in text
    assert "weights/model.layers.*.self_attn.qkv_proj.weight (3): dtype bf16 → i8, nbytes " in text
    assert "weights/model.layers.*.self_attn.qkv_proj.weight.scale (3): only in b, f32 (96,) plain, 384 bytes" in text


def test_another_kv_cache_and_other_limits(folder: Path) -> None:
    kv = found(folder / "bf16", folder / "kv")
    assert kv["recipe"] == {"kv_cache_dtype": ["bf16", "int8"]} and "cpu" in str(kv["sizes"])
    assert list(kv["sections"]) == ["plan/cpu"]
    short = found(folder / "bf16", folder / "short")
    assert short["about"] == {"limits.max_seq_len": [512, 64], "limits.max_batch_size": [32, 3]}
    assert {"about", "recipe", "sections"} <= set(short) <= {"about", "recipe", "sections", "sizes", "evidence"}


def test_sources_name_and_one_weight(folder: Path, tmp_path: Path) -> None:
    name = "weights/model.layers.2.mlp.down_proj.weight"
    with EngineFile.open(folder / "bf16") as file:
        data = file.read_section(name)
    sources = {"a.safetensors": "0" * 64, "b.json": "1" * 64}, {"a.safetensors": "2" * 64, "c.json": "3" * 64}
    one = copied(folder / "bf16", tmp_path / "one", {}, sources=sources[0])
    other = copied(folder / "bf16", tmp_path / "other", {name: data[::-1]}, sources=sources[1], name="other")
    parts = found(one, other)
    assert parts["about"] == {"name": ["tiny", "other"]} and set(parts) == {"about", "sources", "sections"}
    assert parts["sources"] == {
        "a.safetensors": ["0" * 64, "2" * 64],
        "b.json": ["1" * 64, None],
        "c.json": [None, "3" * 64],
    }
    assert list(parts["sections"]) == [name] and list(parts["sections"][name]) == ["sha256"]
    text = run_engine("diff", one, other).stdout
    assert "b.json 111111111111… → nothing" in text and f"{name}: other bytes" in text


def test_goldens_that_differ_leave_the_content_the_same(folder: Path, tmp_path: Path) -> None:
    def golden(prompt: int, *top: tuple[int, float]) -> Golden:
        return Golden((prompt,), top)

    one = Goldens(0.3, (golden(1, (5, -0.5), (6, -1.0)), golden(2, (7, -0.1), (8, -2.0)), golden(3, (1, 0.0))))
    other = Goldens(0.3, (golden(1, (5, -0.6), (6, -0.75)), golden(2, (8, -0.2), (7, -1.9)), golden(4, (1, 0.0))))
    paths = [with_goldens(folder / "bf16", goldens, tmp_path / f"{n}") for n, goldens in enumerate((one, other))]
    report = compare(*paths)
    assert report["same"] and run_engine("diff", *paths).exit_code == 0
    assert report["evidence"] == {
        GOLDENS: {"prompts_in_both": 2, "other_first_tokens": 1, "largest_logprob_difference": 1.8}
    }
    assert "goldens: largest_logprob_difference 1.8" in run_engine("diff", *paths).stdout
    nothing = with_goldens(folder / "bf16", Goldens(0.3, ()), tmp_path / "nothing")
    assert compare(paths[0], nothing)["evidence"][GOLDENS]["largest_logprob_difference"] is None


def test_reports_are_compared_entry_by_entry(folder: Path, tmp_path: Path) -> None:
    def reported(name: str, evidence: bytes) -> Path:
        with EngineFile.open(folder / "bf16") as file, EngineWriter(tmp_path / name, 300) as writer:
            for section, form in file.sections.items():
                kept = {"dtype": form.dtype, "shape": form.shape, "layout": form.layout, "evidence": form.evidence}
                writer.add(section, file.read_section(section), **kept)  # type: ignore[arg-type]
            writer.add("speed", evidence, evidence=True)
            writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
        return tmp_path / name

    one = reported("one", b'{"cpu":{"decode":10,"prefill":98}}')
    other = reported("other", b'{"cpu":{"decode":20,"prefill":98}}')
    assert found(one, other) == {"evidence": {"speed": {"cpu.decode": [10, 20]}}}
    assert found(folder / "bf16", one)["evidence"] == {"speed": {"only_in": "b"}}
    assert found(one, reported("odd", b"no JSON"))["evidence"] == {"speed": {"nbytes": [34, 7]}}
    assert "speed: cpu.decode 10 → 20" in run_engine("diff", one, other).stdout


def test_quality_is_compared_by_its_figures(folder: Path, tmp_path: Path) -> None:
    quality = found(folder / "bf16", folder / "w8a8")["evidence"]["quality"]
    assert quality["kl"][0] < quality["kl"][1] and quality["layers.model.layers.1.mlp.down_proj"][1] > 0
    assert "gate" not in quality and "isa" not in quality
    off = copied(folder / "bf16", tmp_path / "off", {QUALITY: QualityReport("off").to_json()})
    lost = found(folder / "bf16", off)["evidence"]["quality"]
    assert lost["gate"] == ["quick", "off"] and lost["layers.model.layers.1.mlp.down_proj"][1] is None
    assert "quality: kl" in run_engine("diff", folder / "bf16", folder / "w8a8").stdout


def test_long_lists_are_cut_unless_asked_for(folder: Path, tmp_path: Path) -> None:
    many = copied(folder / "bf16", tmp_path / "many", {}, sources={f"{n}.json": "0" * 64 for n in range(40)})
    assert "and 25 more (--all lists them)" in run_engine("diff", folder / "bf16", many).stdout
    assert "39.json" in run_engine("diff", folder / "bf16", many, "--all").stdout


def test_what_cannot_be_read_is_not_1(folder: Path, tmp_path: Path) -> None:
    assert run_engine("diff", folder / "bf16", tmp_path / "no").exit_code == 2
    (tmp_path / "cut").write_bytes((folder / "bf16").read_bytes()[:-1])
    result = run_engine("diff", folder / "bf16", tmp_path / "cut")
    assert result.exit_code == 5 and "cut" in result.stderr
