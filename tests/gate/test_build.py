"""Builds with the gate: what is refused, what is recorded and shown, and that nothing of it hangs on the machine."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.gate import gate as gate_module
from enginewright.builder.gate.config import GateConfig
from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.errors import CorruptEngineError, QualityGateError
from enginewright.manifest import About
from enginewright.passes.quant import W8A8, Int4Rtn, Int8Sq, Int8Wo
from enginewright.runtime.commands.quality import QUALITY, QualityReport
from tests.helpers.command import run_engine
from tests.helpers.tiny import MemoryCheckpoint, tiny_checkpoint


def in_memory(family: str = "llama", **overrides: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint.tiny(family, **overrides)


def quality_of(path: Path) -> QualityReport:
    with EngineFile.open(path) as file:
        assert file.sections[QUALITY].evidence
        return QualityReport.from_json(file.read_section(QUALITY))


def test_a_build_is_measured_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    built = run_engine("build", checkpoint, "--quant", "int8-wo", "-o", path, "--json")
    assert built.exit_code == 0, built.output
    report = quality_of(path)
    assert json.loads(built.stdout)["quality"] == report.to_dict()
    assert report.gate == "quick" and report.measured is not None and not report.measured.failed
    assert "quality gate (quick)" in built.stderr
    assert [check.name for check in report.measured.checks] == ["kl", "top1", "ppl", "layer", "finite"]
    assert json.loads(run_engine("inspect", path, "--json").stdout)["quality"] == report.to_dict()
    shown = run_engine("inspect", path).stdout
    assert f"quality    KL {report.measured.whole.kl:g} nats (" in shown
    assert f"gate quick: kl {report.measured.whole.kl:g} ≤ 0.03, top1 0.9" in shown
    assert (
        f"quality  KL {report.measured.whole.kl:g} nats ("
        in run_engine("build", checkpoint, "--quant", "int8-wo", "-o", path).stderr
    )


def test_a_failed_gate_leaves_the_folder_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    path.write_bytes(b"an earlier engine")
    built = run_engine(
        "build", checkpoint, "--quant", "int4-rtn", "-o", path, "--gate", "kl=0.0001,top1=0.99", "--json"
    )
    assert built.exit_code == 7 and not built.stdout
    assert path.read_bytes() == b"an earlier engine" and list(tmp_path.iterdir()) == [path]
    said = built.stderr
    assert re.search(r"kl is 0\.0\d+ \(0\.0\d+ to 0\.\d+\), at most 0\.0001 passes", said)
    assert "top1 is 0.6" in said
    layers = re.findall(r"^  (model\.\S+) +int4-rtn +(\d+\.\d+)%", said, re.MULTILINE)
    assert len(layers) == 8 and [float(error) for _, error in layers] == sorted(
        (float(error) for _, error in layers), reverse=True
    )
    assert "--zero-points" in said and "--quant int8-wo" in said and "--group-size" not in said
    loosened = re.search(r"--gate (kl=\S+top1=\d\.\d+)", said)
    assert loosened is not None
    again = run_engine("build", checkpoint, "--quant", "int4-rtn", "-o", path, "--gate", loosened[1])
    assert again.exit_code == 0, "what it suggests passes"


def test_what_only_full_measures_is_shown_and_can_be_limited(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    refused = run_engine("build", checkpoint, "--quant", "int4-rtn", "-o", path, "--gate", "full,divergence=60")
    assert refused.exit_code == 7 and not path.exists()
    loosened = re.search(r"--gate (full,divergence=(\d+))", refused.stderr)
    assert loosened is not None
    assert run_engine("build", checkpoint, "--quant", "int4-rtn", "-o", path, "--gate", loosened[1]).exit_code == 0
    assert re.search(
        rf"gate full: kl .*, json 0, divergence {loosened[2]} ≥ {loosened[2]}", run_engine("inspect", path).stdout
    )


def test_off_is_recorded_and_changes_no_content(checkpoint: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "off.engine", tmp_path / "on.engine"]
    assert run_engine("build", checkpoint, "-o", paths[0], "--gate", "off").exit_code == 0
    assert run_engine("build", checkpoint, "-o", paths[1]).exit_code == 0
    assert quality_of(paths[0]) == QualityReport("off")
    assert "quality    not measured (--gate off)" in run_engine("inspect", paths[0]).stdout
    hashes = []
    for path in paths:
        with EngineFile.open(path) as file:
            hashes.append(file.manifest.content_hash)
    assert hashes[0] == hashes[1]


def test_engines_of_before_the_gate_are_shown(tmp_path: Path) -> None:
    build_engine(in_memory(), BuildConfig(gate=None), tmp_path / "new.engine")
    with EngineFile.open(tmp_path / "new.engine") as file, EngineWriter(tmp_path / "old.engine", 100) as writer:
        for name, form in file.sections.items():
            if name != QUALITY:
                kept = {"dtype": form.dtype, "shape": form.shape, "layout": form.layout, "evidence": form.evidence}
                writer.add(name, file.read_section(name), **kept)  # type: ignore[arg-type]
        writer.commit(About(**{field: getattr(file.manifest, field) for field in About.__struct_fields__}))
    assert "quality    not known" in run_engine("inspect", tmp_path / "old.engine").stdout


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_the_whole_file_is_the_same_by_any_number_of_threads(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for threads in (1, 2, 3):
        monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", str(threads))
        path = tmp_path / f"{threads}.engine"
        build_engine(in_memory(family), BuildConfig(quant=Int4Rtn()), path)
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]


class _Page(HTMLParser):
    """A parser that collects a page's tags and attributes; it fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("limits", ["quick", "kl=0"])
def test_the_report_is_one_page_and_json(limits: str, checkpoint: Path, tmp_path: Path) -> None:
    """A build that the gate refuses writes its report too."""
    page = tmp_path / "report.html"
    built = run_engine("build", checkpoint, "-o", tmp_path / "x.engine", "--report", page, "--gate", limits)
    assert built.exit_code == (0 if limits == "quick" else 7)
    assert (tmp_path / "x.engine").exists() == (limits == "quick")
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["recipe"]["quant"] == "bf16" and told["quality"]["gate"] == "quick"
    text = page.read_text()
    read = _Page(text)
    assert not read.tags & {"script", "link", "img", "iframe", "object"} and not read.attributes & {"src", "href"}
    assert "prefers-color-scheme: dark" in text and "url(" not in text and "http" not in text
    errors, sizes, positions = (ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text))
    layers = told["quality"]["measured"]["layers"]
    assert len(errors.findall("circle")) == 12 and len(errors.findall("polyline")) == 4
    of_layers = [layer["name"] for layer in layers if ".layers." in layer["name"]]
    assert len(sizes.findall("rect/title")) == len(of_layers) < len(layers)
    assert all(layer["name"] in text for layer in layers)
    assert len(positions.findall("rect")) == len(told["quality"]["measured"]["ranges"])
    assert ("refused" in text) == (limits != "quick")
    assert str(tmp_path) not in text + json.dumps(told)


def test_names_in_a_report_are_text(tmp_path: Path) -> None:
    checkpoint = in_memory()
    checkpoint.name = "<script>alert(1)</script>"
    build_engine(checkpoint, BuildConfig(report=tmp_path / "r.html"), tmp_path / "x.engine")
    assert "<script" not in (tmp_path / "r.html").read_text()


def test_a_json_report_stands_alone(checkpoint: Path, tmp_path: Path) -> None:
    built = run_engine("build", checkpoint, "-o", tmp_path / "x.engine", "--report", tmp_path / "r.json")
    assert built.exit_code == 0 and {file.name for file in tmp_path.iterdir()} == {"x.engine", "r.json"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--report", "{}/report.pdf"), "may end in .html or .json"),
        (("--report", "{}/nowhere/report.html"), "there is no folder"),
        (("--report", "{}/folder.html"), "it is a folder"),
        (("--report", "{}/blocked.html"), "blocked.json cannot be written"),
        (("--report", "{}/report.html", "--gate", "off"), "measures nothing"),
        (("--gate", "kll=1"), "did you mean kl?"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_build(
    options: tuple[str, ...], words: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "blocked.json").mkdir()
    built = run_engine(
        "build", checkpoint, "-o", tmp_path / "x.engine", *(option.format(tmp_path) for option in options)
    )
    assert built.exit_code == 2 and words in built.stderr
    assert "import the model" not in built.stderr and not (tmp_path / "x.engine").exists()


@pytest.mark.parametrize("longest", [1, 2, 37])
def test_texts_are_cut_to_what_the_engine_takes(longest: int, tmp_path: Path) -> None:
    report = build_engine(in_memory(), BuildConfig(max_seq_len=longest), tmp_path / "x.engine")
    measured = report.quality.measured
    assert measured is not None and measured.all_positions == 16 * longest
    assert {text.distance.positions for text in measured.texts} == {longest}
    assert (measured.whole.perplexity is None) == (longest == 1)
    assert ("ppl" in {check.name for check in measured.checks}) == (longest > 1)


def with_outliers(factor: float) -> MemoryCheckpoint:
    """A model of the same function, with one channel of its layers' inputs `factor` times as large."""
    checkpoint = in_memory()
    stored = {name: values.clone() for name, values in checkpoint.stored.items()}
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name, values in stored.items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        channel = len(name) % 48
        if kind in readers:
            values[channel] *= factor
        for norm, names in readers.items():
            if kind in names:
                block = layer.rpartition(".")[0]
                values[:, len(f"{block}.{norm}.weight") % 48] /= factor
    checkpoint.stored = stored
    return checkpoint


def test_outliers_are_refused_where_nothing_is_done_about_them(tmp_path: Path) -> None:
    checkpoint = with_outliers(128)
    with pytest.raises(QualityGateError, match="--quant int8-sq"):
        build_engine(checkpoint, BuildConfig(quant=W8A8()), tmp_path / "x.engine")
    build_engine(checkpoint, BuildConfig(quant=Int8Sq()), tmp_path / "x.engine")


def test_a_model_that_is_broken_itself_is_refused_as_such(tmp_path: Path) -> None:
    checkpoint = in_memory()
    stored = dict(checkpoint.stored)
    stored["model.norm.weight"] = torch.full_like(stored["model.norm.weight"], torch.inf)
    checkpoint.stored = stored
    with pytest.raises(QualityGateError, match="before anything is quantized"):
        build_engine(checkpoint, BuildConfig(quant=Int8Wo()), tmp_path / "x.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path, "llama", vocab_size=200)
    built = run_engine("build", other, "-o", tmp_path / "x.engine")
    assert built.exit_code == 3 and "the model has 200" in built.stderr


def test_full_asks_for_needles_json_and_what_the_source_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "TOKENS", 500)
    page = tmp_path / "r.html"
    gate = GateConfig(full=True, limits={"needle": 0, "json": 0, "divergence": 0})
    report = build_engine(in_memory(), BuildConfig(gate=gate, report=page), tmp_path / "x.engine")
    assert report.quality.measured is not None
    full = report.quality.measured.full
    assert full is not None and report.quality.gate == "full"
    assert [(needle.length, needle.depth) for needle in full.needles] == [(256, 0.1), (256, 0.5), (256, 0.9)]
    plain = [writing for writing in full.writings if writing.valid_json is None]
    assert len(plain) == 16 and all(0 <= writing.agreed <= writing.tokens <= 64 for writing in full.writings)
    assert sum(writing.agreed for writing in plain) > 0.5 * sum(writing.tokens for writing in plain), "bf16 is close"
    assert "Needles" in page.read_text() and "valid JSON" in page.read_text()


def test_a_damaged_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptEngineError, match="quality report cannot be read"):
        QualityReport.from_json(b'{"gate":"quick","measured":{}}')
    assert QualityReport.from_json(b'{"gate":"off","later":1}') == QualityReport("off")
