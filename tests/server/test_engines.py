"""Several engines in one server: opened when a request names them, closed when idle or when memory is needed."""

import asyncio
import gc
import logging
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.draft import FirstLayers
from enginewright.errors import CorruptEngineError, EngineError, NotEnoughMemoryError, UsageError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.engine_files import files_of
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.log import STDERR, log_to
from enginewright.runtime.server.serve import open_engines, serve
from enginewright.runtime.speculation.draft import DraftModel
from enginewright.runtime.speculation.methods import plan_engine_memory
from tests.helpers.engine_swaps import swap_engines
from tests.helpers.odd_files import ODD_FILES, make_sparse
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LIMITS, Answer, Running, running, tiny_engine, wait_until
from tests.helpers.tiny import MemoryCheckpoint

NAMES = ("llama", "mistral", "qwen3")
TWO = 14 << 20  # memory for any two of them under SMALL (6 or 7 MiB each), and not for all three
SMALL = {"max_model_len": 1024, "kv_cache_memory": 6 << 20}
LONG = {"ignore_eos": True, "max_tokens": 900}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three engines that write different texts."""
    place = tmp_path_factory.mktemp("engines")
    for family in NAMES:
        checkpoint = MemoryCheckpoint.tiny(family, tie_word_embeddings=False, max_position_embeddings=1024)
        build_engine(checkpoint, BuildConfig(gate=None), place / f"{family}.engine")
    return place


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with of_folder(folder) as opened:
        yield opened


def of_folder(folder: Path, limits: Mapping[str, Any] = {}, **config: Any) -> Any:
    return running(engine=sorted(folder.glob("*.engine")), limits=SMALL | limits, **{"memory": TWO} | config)


def started(given: Path, limits: Mapping[str, Any] = {}, **config: Any) -> dict[str, str]:
    """States by name of the engines of a folder or file when a server would take its first request."""

    async def start() -> dict[str, str]:
        engines = Engines.of_files(
            files_of([given]), ServerConfig(**{"memory": TWO} | config), runtime_config(**LIMITS | SMALL | limits)
        )
        return {name: engines.card(name)["state"] for name in engines.names}

    return asyncio.run(start())


def states(server: Running) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.ask("GET", "/v1/models").json["data"]}


def openings(log: pytest.LogCaptureFixture) -> list[str]:
    """Names of engines, in the order in which they were opened."""
    return [line.split()[0] for line in log.messages if " is open after " in line]


@pytest.fixture(autouse=True)
def log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="enginewright")


def test_streams_while_engines_are_swapped(folder: Path, server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """32 streams at a time of three engines, of which two fit: no error, and each answer is the one given alone."""
    prompts = [[3 + number % 60, 7, 3 + number % 11] for number in range(96)]
    alone = {}
    for name in NAMES:
        with LLM(folder / f"{name}.engine", **LIMITS | SMALL) as llm:
            params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
            alone[name] = [output.outputs[0].text for output in llm.generate(prompts, params)]

    def stream(number: int) -> str:
        asked = {"model": NAMES[number // 5 % 3], "max_tokens": 15, "temperature": 0, "stream": True}
        *events, end = server.complete(prompts[number], **asked)
        assert end == "[DONE]"
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(stream, range(96)))
    assert texts == [alone[NAMES[number // 5 % 3]][number] for number in range(96)]
    assert len({*map(tuple, alone.values())}) == 3 and len(openings(caplog)) > 3
    assert sorted(states(server).values()) == ["closed", "open", "open"]


def test_the_least_recently_used_is_closed(server: Running) -> None:
    assert states(server) == dict.fromkeys(NAMES, "closed")
    for name in ("llama", "mistral", "llama"):
        assert server.complete("a", model=name)["model"] == name
    assert states(server) == {"llama": "open", "mistral": "open", "qwen3": "closed"}
    server.complete("a", model="qwen3")
    assert states(server) == {"llama": "open", "mistral": "closed", "qwen3": "open"}


@pytest.mark.parametrize("kv_cache_memory", [4 << 20, None])
def test_the_memory_of_a_draft_is_counted(tmp_path: Path, kv_cache_memory: int | None) -> None:
    """A draft's activations and KV cache are in the forecast of both models, and another engine is closed for them."""
    model = MemoryCheckpoint.tiny("llama", tie_word_embeddings=False, max_position_embeddings=1024)
    for name in "ab":
        build_engine(model, BuildConfig(gate=None), tmp_path / f"{name}.engine", draft=FirstLayers(1))
    limits = SMALL | {"kv_cache_memory": kv_cache_memory, "speculate": "skip"}
    with Engine.open(tmp_path / "a.engine") as engine:
        planned, nbytes = plan_engine_memory(engine, runtime_config(**LIMITS | limits), 256 << 20)
        with closing(EngineCore(engine, planned)) as core:
            assert core._speculator is not None
            draft = core._speculator.proposer
            assert isinstance(draft, DraftModel)
            plans = core.executor.memory_plan, draft.runner.executor.memory_plan
        assert nbytes == engine.weight_bytes + sum(one.arena_bytes + one.kv_bytes for one in plans)
        assert all(one.arena_bytes > 0 and one.kv_bytes > 0 for one in plans)
    if kv_cache_memory is not None:  # else it follows from what is there
        assert sum(one.kv_bytes for one in plans) <= kv_cache_memory
        for memory, left in (2 * nbytes, "open"), (2 * nbytes - 1, "closed"):
            with of_folder(tmp_path, limits, memory=memory) as server:
                for name in "ab":
                    server.complete("a", model=name)
                assert states(server) == {"a": left, "b": "open"}


def test_requests_name_their_engine(server: Running) -> None:
    known = "llama, mistral, qwen3"
    without = server.post(COMPLETIONS, {"prompt": "a"})
    assert (without.status, without.error["param"]) == (400, "model") and known in without.error["message"]
    unknown = server.post(CHAT, {"messages": HELLO, "model": "other"})
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found") and known in unknown.error["message"]
    assert server.ask("GET", "/v1/models/other").status == 404
    card = server.ask("GET", "/v1/models/qwen3").json
    assert (card["max_model_len"], card["state"]) == (1024, "closed")
    counted = server.post("/tokenize", {"prompt": "a b", "model": "mistral"})
    assert counted.status == 200 and states(server)["mistral"] == "open"
    text = server.post("/detokenize", {"tokens": counted.json["tokens"], "model": "mistral"})
    assert text.json["prompt"].endswith("a b")


def test_metrics_are_of_each_engine_and_go_on_when_it_is_opened_again(server: Running) -> None:
    for name in (*NAMES, "llama"):
        server.complete("a", model=name, max_tokens=5)
    server.post(COMPLETIONS, {"prompt": "a", "model": "other"})
    server.post(COMPLETIONS, {"prompt": [], "model": "llama"})
    text = server.ask("GET", "/metrics").body.decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "each is described once"
    values = {
        (sample.name.removeprefix("enginewright_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert [values["generation_tokens_total", name] for name in NAMES] == [10, 5, 5]
    assert [values["engine_open", name] for name in NAMES] == [1, 0, 1]
    assert [values["engine_opening_seconds_count", name] for name in NAMES] == [2, 1, 1]
    assert values["e2e_request_latency_seconds_count", "llama"] == 2
    assert (values["request_rejected_total", "", "404"], values["request_rejected_total", "llama", "400"]) == (1, 1)


def test_requests_for_a_closed_engine_open_it_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.complete("a", model="llama")["choices"][0]["text"], range(8)))
    assert len(set(answers)) == 1 and openings(caplog) == ["llama"]


@contextmanager
def two_held_streams(server: Running) -> Iterator[list[Callable[[], Answer]]]:
    """Streams of two engines that have begun, and do not go on before this is left; functions read their rest."""
    names, steps = NAMES[:2], Counter[AsyncLLM]()

    def has_begun(llm: AsyncLLM) -> bool:
        steps[llm] += 1
        return steps[llm] > 5

    for name in names:
        server.complete("a", model=name, max_tokens=1)
    with server.held_steps(once=has_begun):
        yield [server.begin(COMPLETIONS, {"prompt": "a", "model": name, **LONG}) for name in names]


def test_an_engine_in_use_is_not_closed(server: Running) -> None:
    """The one that is to be closed takes no new requests: they wait, and it is opened again for them."""
    with ThreadPoolExecutor(8) as pool:
        with two_held_streams(server) as streams:
            other = pool.submit(server.complete, "a", model="qwen3")
            wait_until(lambda: "closing" in states(server).values())
            (name,) = [name for name, state in states(server).items() if state == "closing"]
            again = pool.submit(server.complete, "b", model=name)
            (closing,) = [one for one in server.engines.all if one.state == "closing"]
            wait_until(lambda: len(closing.waiting) == 1)
        assert all(one().events[-1] == "[DONE]" for one in streams)
        assert other.result()["model"] == "qwen3" and again.result()["model"] == name


def test_a_client_that_leaves_while_an_engine_is_opened(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves while its engine waits for memory causes no other engine to be closed."""
    with two_held_streams(server) as streams:
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": "a", "model": "qwen3"})
            wait_until(lambda: "closing" in states(server).values())
        wait_until(lambda: "closing" not in states(server).values())
    assert all(one().events[-1] == "[DONE]" for one in streams)
    assert states(server) == {"llama": "open", "mistral": "open", "qwen3": "closed"}


def test_a_timeout_ends_the_wait_for_an_engine(server: Running) -> None:
    late = server.post(COMPLETIONS, {"prompt": "a", "model": "llama", "timeout": 1e-6})
    assert late.status == 504 and late.error["code"] == "timeout"
    assert server.complete("a", model="llama", timeout=60)["model"] == "llama"


def test_a_folder_without_engines(folder: Path, tmp_path: Path) -> None:
    assert [path.stem for path in map(Path, files_of([folder]))] == sorted(NAMES)
    with pytest.raises(UsageError, match=r"there is no engine in .*: no name of a file there ends in \.engine"):
        files_of([folder, tmp_path])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="not an engine: build it first"):
        files_of([tmp_path])


def test_what_cannot_be_opened_harms_nobody(folder: Path, tmp_path: Path) -> None:
    """A damaged file, and one that does not fit; once a file is sound, it is served."""
    shutil.copy(folder / "llama.engine", tmp_path)
    shutil.copy(tiny_engine(), tmp_path / "big.engine")
    (tmp_path / "bad.engine").write_bytes(b"nothing")
    with of_folder(tmp_path, {"max_model_len": None, "kv_cache_memory": None}, memory=8 << 20) as server:
        assert states(server) == {"bad": "failed", "big": "failed", "llama": "closed"}
        server.complete("a", model="llama")
        bad, big = (server.post(COMPLETIONS, {"prompt": "a", "model": name}) for name in ("bad", "big"))
        for answer, why in ((bad, "its file is damaged"), (big, "it needs more memory than this server has")):
            assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
            assert answer.error["message"].endswith(why) and str(tmp_path) not in answer.error["message"]
        assert server.ask("GET", "/health").status == 200
        server.complete("a", model="llama")
        (tmp_path / "bad.engine").unlink()
        assert server.post(COMPLETIONS, {"prompt": "a", "model": "bad"}).status == 503
        shutil.copy(folder / "mistral.engine", tmp_path / "bad.engine")
        assert server.complete("a", model="bad")["model"] == "bad"


def test_whatever_a_folder_has_does_not_end_the_start(folder: Path, tmp_path: Path, caplog: Any) -> None:
    """A file that is no engine is warned of and listed as failed, and a request for it gets a 503."""
    shutil.copy(folder / "llama.engine", tmp_path)
    for kind, make in ODD_FILES.items():
        make(tmp_path / f"{kind}.engine")
    make_sparse(tmp_path / "sparse.engine")
    (tmp_path / "locked.engine").write_bytes(b"nothing")
    (tmp_path / "locked.engine").chmod(0)
    (tmp_path / "checkpoint.engine").mkdir()
    (tmp_path / "checkpoint.engine" / "config.json").write_text("{}")
    odd = [*ODD_FILES, "sparse", "locked", "checkpoint"]
    with of_folder(tmp_path) as server:
        assert states(server) == dict.fromkeys(odd, "failed") | {"llama": "closed"}
        for name in odd:
            assert f"{name}.engine cannot be served as it is: " in caplog.text
            answer = server.post(COMPLETIONS, {"prompt": "a", "model": name})
            assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
        assert server.complete("a", model="llama")["model"] == "llama"


def test_names_of_files_are_escaped_wherever_they_are_read(
    folder: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are escaped as names of models, in the ready line, the log, errors and /metrics: they add no line."""
    # pytest's own handlers would keep the name as it is, which the workers of pytest-xdist cannot send.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shutil.copy(folder / "llama.engine", tmp_path / "evil\n# HELP x\x1b[31m.engine")
    (tmp_path / os.fsdecode(b"bad\n2026-01-01T00:00:00.000Z info request \x9b\xff.engine")).write_bytes(b"nothing")
    good = r"evil\n# HELP x\x1b[31m"
    with log_to(STDERR, "info", "text") as announce, of_folder(tmp_path) as server:
        bad, found = sorted(states(server))
        assert (found, bad.isprintable()) == (good, True) and states(server)[bad] == "failed"
        assert server.complete("a", model=good)["model"] == good
        assert server.post(COMPLETIONS, {"prompt": "a", "model": bad}).error["code"] == "model_unavailable"
        assert server.post(COMPLETIONS, {"prompt": "a"}).error["message"].isprintable()
        page = server.ask("GET", "/metrics").body.decode()
        announce(f"serving {', '.join(server.engines.names)}")
    assert f'model_name="{good.replace(chr(92), chr(92) * 2)}"' in page
    names = {one.labels.get("model_name") for family in text_string_to_metric_families(page) for one in family.samples}
    assert good in names and "\x1b" not in page
    lines = capfd.readouterr().err.splitlines()
    assert all(line.isprintable() for line in lines)
    assert not [line for line in lines if line.startswith(("# HELP", "2026-01-01T00:00:00.000Z"))]
    assert any(line.startswith(f"serving {bad}, {good}") for line in lines)
    assert len([line for line in lines if "cannot be served as it is" in line]) == 1


def test_what_is_no_engine_alone_is_an_error(tmp_path: Path) -> None:
    """A file that is no engine, alone in a folder or named itself, is an error with the exit code of opening it."""
    codes = {"dangling link": 2, "loop of links": 2}
    for kind, make in ODD_FILES.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind / "x.engine")
        given = tmp_path / kind / "x.engine" if kind == "folder" else tmp_path / kind
        code = 2 if kind == "folder" else codes.get(kind, 5)
        with pytest.raises(EngineError) as error:
            started(given)
        assert error.value.exit_code == code and "x.engine" in str(error.value), kind


def test_a_name_that_is_mistyped_ends_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        serve([folder, tmp_path / "no.engine"], ServerConfig(port=0))
    with pytest.raises(UsageError, match="there is no such file"):
        serve([tmp_path / "no.engine", folder], ServerConfig(port=0))
    with pytest.raises(UsageError, match="is no device"):
        started(folder, {"device": "gpu"})


def test_kv_caches_of_less_than_one_sequence_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """Such limits are refused as for a single engine; the error names the engine and the memory that it needs."""
    shutil.copy(folder / "llama.engine", tmp_path)
    for given, name in (folder, "llama"), (tmp_path, "llama"):
        with pytest.raises(NotEnoughMemoryError) as error:
            started(given, {"kv_cache_memory": 64 << 10})
        assert f"{name}.engine needs more than --kv-cache-memory 64.0 KiB" in error.value.what
        assert error.value.why.startswith("the KV cache of one sequence of 1024 positions takes ")
        assert "larger --kv-cache-memory" in error.value.fix


@pytest.mark.parametrize("kv_cache_memory", [6 << 20, None])
def test_options_that_no_request_could_be_answered_with_are_refused_at_the_start(
    folder: Path, kv_cache_memory: int | None
) -> None:
    with pytest.raises(UsageError, match=r"llama.engine has no draft model"):
        started(folder, {"speculate": "draft", "kv_cache_memory": kv_cache_memory})
    with pytest.raises(UsageError, match="'sse9' is no instruction set"):
        started(folder, {"isa": "sse9"})


@pytest.mark.parametrize("kv_cache_memory", [6 << 20, None])
def test_memory_that_no_engine_fits_is_refused_at_the_start(
    folder: Path, tmp_path: Path, kv_cache_memory: int | None
) -> None:
    """No engine fits here; if some fit, the others are warned of: test_what_cannot_be_opened_harms_nobody."""
    limits = {"kv_cache_memory": kv_cache_memory}
    with pytest.raises(NotEnoughMemoryError) as error:
        started(folder, limits, memory=64 << 10)
    assert "llama.engine does not fit the memory" in error.value.what and "--memory" in error.value.fix
    assert "64.0 KiB" in error.value.what
    shutil.copy(folder / "llama.engine", tmp_path)
    (tmp_path / "bad.engine").write_bytes(b"nothing")
    with pytest.raises(NotEnoughMemoryError):
        started(tmp_path, limits, memory=64 << 10)


def test_a_file_that_is_replaced_is_served_again(folder: Path, tmp_path: Path) -> None:
    """A replaced file is served from its next opening on; one that was written to fails requests, and is reopened."""
    served, new = tmp_path / "served.engine", tmp_path / "new"
    shutil.copy(folder / "llama.engine", served)
    with of_folder(tmp_path, idle_seconds=0.3) as server:
        first = server.complete("a")
        shutil.copy(folder / "mistral.engine", new)
        new.replace(served)
        wait_until(lambda: "closed" in states(server).values())
        second = server.complete("a")
        assert second["system_fingerprint"] != first["system_fingerprint"]
        shutil.copy(folder / "llama.engine", served)
        server.post(COMPLETIONS, {"prompt": "a"})
        wait_until(lambda: server.post(COMPLETIONS, {"prompt": "a"}).status == 200)
        assert server.complete("a")["system_fingerprint"] == first["system_fingerprint"]


def test_an_idle_engine_is_closed_and_its_memory_is_free(folder: Path) -> None:
    with of_folder(folder, idle_seconds=600) as server:
        server.complete("a", model="llama")
        server.post(CHAT, {"messages": HELLO, "model": "llama"})
        (service,) = server.engines.services
        executor = weakref.ref(service.llm._core.executor)
        del service
        server.call(setattr, server.engines, "config", replace(server.engines.config, idle_seconds=0.1))
        wait_until(lambda: states(server)["llama"] == "closed")
        wait_until(lambda: gc.collect() >= 0 and executor() is None)
        server.complete("a", model="llama")


@pytest.mark.parametrize("keeps", [True], ids=["disk and draft tokens"])  # tests/long has one without
def test_a_closed_engine_is_freed_at_once(folder: Path, tmp_path: Path, keeps: bool) -> None:
    """Nothing of an engine is left once another has taken its place, however it was used."""
    kept = {"kv_cache_disk": 1 << 20, "kv_cache_dir": str(tmp_path), "speculate": "ngram", "mmap": False}
    with of_folder(folder, kept if keeps else {}, memory=TWO // 2 + (2 << 20)) as server:
        swap_engines(server, NAMES[:2], num_swaps=12, max_growth_bytes=8 << 20)


def test_draining(folder: Path) -> None:
    """Requests that wait for an engine may go on; new ones are refused."""
    with of_folder(folder, drain_seconds=60) as server, ThreadPoolExecutor(8) as pool:
        with two_held_streams(server) as streams:
            waits = pool.submit(server.complete, "a", model=NAMES[2], stream=True)
            wait_until(lambda: "closing" in [one.state for one in server.engines.all])
            server.end()
            wait_until(lambda: server.engines.draining)
            assert server.post(COMPLETIONS, {"prompt": "a", "model": "llama"}).error["code"] == "server_shutdown"
            assert server.ask("GET", "/health").status == 503
        assert [one().events[-1] for one in streams] == ["[DONE]"] * 2
        assert waits.result()[-1] == "[DONE]"


def test_what_waits_is_told_of_the_end(folder: Path) -> None:
    with of_folder(folder, drain_seconds=0) as server, ThreadPoolExecutor(8) as pool:
        with two_held_streams(server) as streams:
            waits = pool.submit(server.post, COMPLETIONS, {"prompt": "a", "model": "qwen3"})
            wait_until(lambda: "closing" in [one.state for one in server.engines.all])
            server.end()
            assert waits.result().error["code"] == "server_shutdown"
        assert [one().events[-1]["error"]["code"] for one in streams] == ["server_shutdown"] * 2


def test_too_many_that_wait_are_turned_away(folder: Path) -> None:
    with of_folder(folder, max_num_waiting=1) as server, ThreadPoolExecutor(8) as pool:
        with two_held_streams(server) as streams:
            waits = pool.submit(server.complete, "a", model="qwen3")
            wait_until(lambda: len(server.engines.all[2].waiting) == 1)
            refused = server.post(COMPLETIONS, {"prompt": "a", "model": "qwen3"})
            assert refused.status == 429 and "1 requests wait until qwen3 is open" in refused.error["message"]
        assert waits.result() and all(one().events for one in streams)


def test_what_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "llama.engine", tmp_path)
    with pytest.raises(UsageError, match=r"two engines have the name llama: .*\nRename"):
        serve([folder, tmp_path], ServerConfig(port=0))
    with pytest.raises(UsageError, match="--served-model-name names one engine: here are 3"):
        serve([folder], ServerConfig(port=0, served_model_names=("x",)))
    with pytest.raises(UsageError, match="--max-model-len 2048 is more than the engine was built for"):
        serve([folder], ServerConfig(port=0), max_model_len=2048)
    (tmp_path / "llama.engine").write_bytes(b"nothing")
    with pytest.raises(CorruptEngineError):
        serve([tmp_path], ServerConfig(port=0, idle_seconds=5))
    with pytest.raises(UsageError, match="idle_seconds is -1"):
        ServerConfig(idle_seconds=-1)
    with pytest.raises(UsageError, match="memory is 0"):
        ServerConfig(memory=0)


@pytest.mark.parametrize("config", [{}, {"memory": TWO}], ids=["open", "on demand"])
def test_a_file_alone_has_its_models_name_and_its_own(folder: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    file = tmp_path / "tools.engine"
    file.symlink_to(folder / "llama.engine")

    async def names(**given: Any) -> tuple[list[str], set[str]]:
        engines = await open_engines(file, ServerConfig(**config, **given), SMALL | {"threads": 1}, verify=False)
        try:
            return list(engines.names), {engines.card(name)["root"] for name in engines.names}
        finally:
            await engines.close()

    with Engine.open(file) as opened:
        model = opened.manifest.name
    assert model != "tools" and asyncio.run(names()) == ([model, "tools"], {model})
    assert asyncio.run(names(served_model_names=("mine",))) == (["mine"], {"mine"})


def test_an_engine_that_stays_open_says_what_fits_it() -> None:
    with running(limits={"max_model_len": 100}) as server:
        (card,) = server.ask("GET", "/v1/models").json["data"]
        assert (card["max_model_len"], card["state"]) == (100, "open")
