"""Whole builds: the same bytes twice, failures that leave nothing, and engines that compute what transformers does."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors
import torch

from enginewright import _cpu
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, NotEnoughMemoryError, UnsupportedModelError, UsageError
from enginewright.passes.quant import QuantConfig
from enginewright.runtime.commands.score import score
from enginewright.runtime.commands.verify import verify
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.graphs import QUANTS, relative_error
from tests.helpers.tiny import (
    ALL_EXPERTS,
    OF_KERNELS,
    MemoryCheckpoint,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)


def content_of(path: Path) -> tuple[str, dict[str, bytes]]:
    with EngineFile.open(path) as file:
        names = [name for name, form in file.sections.items() if not form.evidence]
        return file.manifest.content_hash, {name: file.read_section(name) for name in names}


BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: list[tuple[str, dict[str, object]]] = [
    *((family, dict(ALL_EXPERTS.get(family, {}))) for family in OF_KERNELS),
    ("llama", BIASES),
    ("llama", {"rope_parameters": YARN}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
]


def name_of(case: object) -> str:
    """Name of a value of a test's parameters."""
    return getattr(case, "name", None) or ("-".join(case) if isinstance(case, dict) else str(case))


EACH = [(family, overrides, quant) for family, overrides in CASES for quant in QUANTS]
SOME = [each for n, each in enumerate(EACH) if (n + n // len(QUANTS)) % len(QUANTS) == 0]  # a method each, in turn


@pytest.mark.parametrize("quant", [quant for quant in QUANTS if not quant.calibrated], ids=lambda quant: quant.name)
def test_a_build_reads_each_tensor_once(quant: QuantConfig, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama", **BIASES)
    build_engine(checkpoint, BuildConfig(quant=quant, gate=None), tmp_path / "tiny.engine")
    assert sorted(checkpoint.reads) == sorted(checkpoint.tensors)


@pytest.mark.parametrize(("family", "overrides", "quant"), SOME, ids=name_of)
def test_an_engine_computes_what_transformers_does(
    family: str, overrides: dict[str, object], quant: QuantConfig, tmp_path: Path
) -> None:
    """All logits of texts of awkward lengths, longer than a window, a KV block, and a split of attention."""
    config = tiny_config(family, **overrides)
    model = tiny_model(config)
    path = tmp_path / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(quant=quant, gate=None), path)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, config["vocab_size"], (n,), generator=generator).tolist() for n in (1, 2, 33, 61, 307)]
    with torch.inference_mode():
        expected = [model(torch.tensor([text])).logits[0].numpy() for text in texts]
    for isa in _cpu.isa_names():
        with Engine.open(path) as engine:
            actual = score(
                CpuExecutor(engine, RuntimeConfig(isa=isa, max_num_batched_tokens=64, max_logit_rows=64)), texts
            )
        for rows, reference in zip(actual, expected, strict=True):
            assert relative_error(rows, reference) < tolerances.ENGINE_LOGITS[quant.name]


@pytest.mark.parametrize("quant", QUANTS[::3], ids=name_of)  # tests/long has all
def test_two_builds_in_two_folders_have_the_same_content(quant: QuantConfig, tmp_path: Path) -> None:
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path / folder, "qwen3")))
        paths.append(tmp_path / folder / f"{folder}.engine")
        build_engine(checkpoint, BuildConfig(quant=quant), paths[-1])
    assert content_of(paths[0]) == content_of(paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes(), "on one machine the evidence is the same, too"


def test_any_safetensors_reader_opens_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "tiny.engine"
    build_engine(open_checkpoint(str(tiny_checkpoint(tmp_path, "llama"))), BuildConfig(), path)
    with safetensors.safe_open(path, framework="pt") as file, EngineFile.open(path) as ours:
        assert set(file.keys()) == set(ours.sections)
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            stored = file.get_tensor(name).numpy().tobytes()
            assert stored[: ours.sections[name].nbytes] == ours.read_section(name)


def test_flipping_any_sections_byte_is_named_by_verify_and_refused_by_run(tmp_path: Path) -> None:
    path = tmp_path / "tiny.engine"
    build_engine(open_checkpoint(str(tiny_checkpoint(tmp_path, "llama"))), BuildConfig(), path)
    whole = path.read_bytes()
    with EngineFile.open(path) as file:
        sections, offsets = dict(file.sections), dict(file.offsets)
    for name, form in sections.items():
        damaged = bytearray(whole)
        damaged[offsets[name] + form.nbytes // 2] ^= 0x10
        path.write_bytes(damaged)
        with EngineFile.open(path, check_sections=False) as file:
            assert file.verify_sections() == [name]
        if not name.startswith("weights/"):
            with pytest.raises(EngineError, match="damaged") as refused:
                Engine.open(path)
            assert refused.value.exit_code == 5 and name in str(refused.value)


def test_an_unknown_model_type_names_the_nearest(tmp_path: Path) -> None:
    config = tiny_config("llama")
    checkpoint = MemoryCheckpoint.of(tiny_model(config), {**config, "model_type": "lama"})
    with pytest.raises(UnsupportedModelError, match="Did you mean llama"):
        build_engine(checkpoint, BuildConfig(), tmp_path / "x.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama")
    with pytest.raises(UsageError, match="512 positions"):
        build_engine(checkpoint, BuildConfig(max_seq_len=513), tmp_path / "x.engine")


@pytest.mark.parametrize("length", [1, 39])
def test_an_engine_may_be_shorter_than_its_goldens(length: int, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama")
    build_engine(checkpoint, BuildConfig(max_seq_len=length), tmp_path / "x.engine")
    assert verify(tmp_path / "x.engine", goldens=True)["goldens"] == "right"


def test_goldens_take_no_memory_for_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama", max_position_embeddings=1 << 20)
    monkeypatch.setattr("enginewright.runtime.device.memory_plan.free_memory", lambda: 1 << 26)
    build_engine(checkpoint, BuildConfig(), tmp_path / "x.engine")
    assert verify(tmp_path / "x.engine", goldens=True)["goldens"] == "right"
    with Engine.open(tmp_path / "x.engine") as engine, pytest.raises(NotEnoughMemoryError):
        CpuExecutor(engine, RuntimeConfig())


FAULTY_CALLS = ("write", "pwrite", "pwritev", "fsync", "fdatasync", "rename", "replace", "link", "ftruncate")


def test_every_system_call_of_a_build_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write, sync and rename of a build fails in turn; the folder is then as it was, an earlier engine too."""
    checkpoint = MemoryCheckpoint.tiny("llama", num_hidden_layers=1)
    path = tmp_path / "x.engine"
    path.write_bytes(b"an earlier engine")
    calls = 0
    fail_at = -1

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call

    for name in FAULTY_CALLS:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    build_engine(checkpoint, BuildConfig(gate=None), path)
    total = calls
    assert total > 10
    path.write_bytes(b"an earlier engine")
    survived = []
    for fail_at in range(1, total + 1):
        calls = 0
        try:
            build_engine(checkpoint, BuildConfig(gate=None), path)
            survived.append(fail_at)
            path.write_bytes(b"an earlier engine")
        except EngineError as error:
            assert error.exit_code == 1 and "x.engine" in str(error)
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.engine"]
        assert path.read_bytes() == b"an earlier engine"
    # A call whose failure does not matter (reserving space, a hint) may be survived; a write may not.
    assert len(survived) <= 2


def test_a_killed_build_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    folder = tmp_path / "out"
    folder.mkdir()
    code = (
        "import threading\n"
        "from itertools import count\n"
        "from pathlib import Path\n"
        "from enginewright.builder import assembly, build\n"
        "from enginewright.builder.checkpoint import open_checkpoint\n"
        "def third_hangs(weight, progress, pack=assembly.packed, number=count(1)):\n"
        "    if next(number) == 3:\n"
        "        print('packing', flush=True)\n"
        "        threading.Event().wait()\n"
        "    yield from pack(weight, progress)\n"
        "assembly.packed = third_hangs\n"
        f"path = Path({str(folder)!r}) / 'x.engine'\n"
        f"build.build_engine(open_checkpoint({str(checkpoint)!r}), build.BuildConfig(), path)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "packing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (folder / "x.engine").exists()
    build_engine(open_checkpoint(str(checkpoint)), BuildConfig(), folder / "x.engine")
    assert [entry.name for entry in folder.iterdir()] == ["x.engine"]


def test_a_chat_template_is_tried(tmp_path: Path) -> None:
    """One that cannot show a message, or does not come to an end, is a note: what else the engine does, it does."""
    config = tiny_config("llama")
    stored = MemoryCheckpoint.of(tiny_model(config), config).stored
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}"
    for source, why in (("{{ messages[1].content + 'x' }}", "failed"), ("{% if %}", "read"), (endless, "CPU time")):

        @dataclass
        class Templated(MemoryCheckpoint):
            @property
            def tokenizer(self) -> TokenizerFiles:
                return replace(super().tokenizer, chat_template=source)  # noqa: B023 (used before the next one)

        report = build_engine(Templated(config, stored), BuildConfig(gate=None), tmp_path / "tiny.engine")
        (note,) = report.notes
        assert note.startswith("no chats of one message: the chat template") and why in note
    checkpoint = MemoryCheckpoint(config, stored)
    assert build_engine(checkpoint, BuildConfig(gate=None), tmp_path / "fine.engine").notes == []
