"""Adapters over HTTP: names of models, what is listed, and updates by holders of an admin key."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.server.config import ServerConfig
from tests.helpers.adapters import prepared, trained
from tests.helpers.engines import folder_of_engines
from tests.helpers.serving import CHAT, HELLO, Running, wait_until
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

ADMIN = {"Authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LORA = {"enable_lora": True}


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Two engines, and adapters `poet` and `lawyer` of the first and `cook` of the second."""
    folder, found = folder_of_engines() / "served-adapters", {}
    folder.mkdir()
    for name, seed in ("one", 0), ("two", 1):
        config = tiny_config("llama")
        model = tiny_model(config, seed)
        found[name] = folder / f"{name}.engine"
        build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), found[name])
        for number, adapter in enumerate({"one": ("poet", "lawyer"), "two": ("cook",)}[name]):
            modules = ["embed_tokens", "lm_head"] if adapter == "lawyer" else ["q_proj", "down_proj"]
            trained(model, folder / adapter, seed=number, target_modules=modules)
            found[adapter] = prepared(found[name], folder / adapter)
    return found


@pytest.fixture
def folder(files: dict[str, Path], tmp_path: Path) -> Path:
    """A folder with the adapters `poet` and `cook`."""
    for name in ("poet", "cook"):
        shutil.copy(files[name], tmp_path / f"{name}.lora")
    return tmp_path


@pytest.fixture
def server(request: pytest.FixtureRequest, files: dict[str, Path], folder: Path) -> Iterator[Running]:
    """A server, perhaps of an engine with more limits."""
    config = ServerConfig(
        served_model_names=("base",), lora_modules=(f"law={files['lawyer']}",), lora_dir=str(folder),
        enable_lora_updates=True, admin_keys=("admin",),
    )  # fmt: skip
    with Running(files["one"], config, {**LORA, **getattr(request, "param", {})}) as running:
        yield running


def text(server: Running, model: str, **options: Any) -> str:
    body = {"messages": HELLO, "model": model, "max_tokens": 8, "temperature": 0, **options}
    answer = server.post(CHAT, body)
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    return str(answer.json["choices"][0]["message"]["content"])


def test_a_model_names_an_adapter(server: Running) -> None:
    texts = [text(server, name) for name in ("base", "law", "poet")]
    assert len(set(texts)) == 3
    assert [text(server, f"base:{name}") for name in ("law", "poet")] == texts[1:]
    complete = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    answers = [server.post("/v1/completions", {**complete, "model": name}).json for name in ("base", "law")]
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]


def test_adapters_are_listed_with_their_parent(server: Running) -> None:
    cards = {card["id"]: card for card in server.ask("GET", "/v1/models").json["data"]}
    assert list(cards) == ["base", "cook", "law", "poet"]
    assert [card["parent"] for card in cards.values()] == [None, "base", "base", "base"]
    assert server.ask("GET", "/v1/models/law").json == cards["law"]


@pytest.mark.parametrize(
    "name", ["none", "base:none", "../poet", "poet/../poet", ".poet", "law:poet", "a\0b", "poet.lora"]
)
def test_unknown_adapters(server: Running, name: str) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "model": name})
    assert answer.status == 404 and answer.error["code"] == "model_not_found"


def test_an_adapter_of_another_engine_is_refused(server: Running) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "model": "cook"})
    assert answer.status == 400 and "does not belong to the engine" in answer.error["message"]
    assert text(server, "poet")


@pytest.mark.parametrize("server", [{}, {"tensor_parallel_size": 2}], ids=["one process", "ranks"], indirect=True)
def test_adapters_come_and_go(server: Running, files: dict[str, Path], folder: Path) -> None:
    right = text(server, "law")
    shutil.copy(files["lawyer"], folder / "later.lora")
    assert text(server, "later") == right, "a file of the folder needs no restart"
    body = {"lora_name": "jurist", "lora_path": "later.lora"}
    loaded = server.post(LOAD, body, ADMIN)
    assert loaded.status == 200 and b"'jurist' added" in loaded.body
    assert text(server, "jurist") == right and "jurist" in server.engines.names
    assert server.post(LOAD, {**body, "lora_path": str(folder / "poet.lora")}, ADMIN).status == 200
    assert text(server, "jurist") == text(server, "poet") != right, "another file replaces it"
    assert server.post(UNLOAD, {"lora_name": "jurist"}, ADMIN).status == 200
    assert server.post(CHAT, {"messages": HELLO, "model": "jurist"}).status == 404
    assert server.post(UNLOAD, {"lora_name": "jurist"}, ADMIN).status == 404


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        ({"lora_name": "x", "lora_path": "poet.lora"}, {}, 401, "admin keys"),
        ({"lora_name": "x", "lora_path": "poet.lora"}, {"Authorization": "Bearer other"}, 401, "admin keys"),
        ({"lora_name": "x", "lora_path": "none.lora"}, ADMIN, 400, "no file"),
        ({"lora_name": "x", "lora_path": "../../etc/passwd"}, ADMIN, 400, "no file"),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, ADMIN, 400, "no file"),
        ({"lora_name": "x", "lora_path": "."}, ADMIN, 400, "no file"),
        ({"lora_name": "x", "lora_path": "a\0b"}, ADMIN, 400, "no file"),
        ({"lora_name": "x", "lora_path": "cook.lora"}, ADMIN, 400, "for another engine"),
        ({"lora_name": "x", "lora_path": "text.lora"}, ADMIN, 400, "cannot be loaded"),
        ({"lora_name": "base", "lora_path": "poet.lora"}, ADMIN, 400, "name of an engine"),
        ({"lora_name": "", "lora_path": "poet.lora"}, ADMIN, 400, "no name"),
        ({"lora_path": "poet.lora"}, ADMIN, 400, "lora_name"),
        ([], ADMIN, 400, "cannot be read"),
    ],
)
def test_updates_that_are_refused(
    server: Running, folder: Path, body: Any, headers: dict[str, str], status: int, message: str
) -> None:
    (folder / "text.lora").write_text("no adapter")
    before = server.engines.names
    answer = server.post(LOAD, body, headers)
    assert answer.status == status and message in answer.error["message"]
    assert server.engines.names == before


def test_an_admin_key_is_no_api_key(files: dict[str, Path], folder: Path) -> None:
    config = ServerConfig(api_keys=("user",), lora_dir=str(folder), enable_lora_updates=True, admin_keys=("admin",))
    with Running(files["one"], config, LORA) as server:
        body = {"lora_name": "x", "lora_path": "poet.lora"}
        assert server.post(LOAD, body, {"Authorization": "Bearer user"}).status == 401
        assert server.post(LOAD, body, ADMIN).status == 200
        assert server.post(CHAT, {"messages": HELLO}, ADMIN).status == 401


def test_engines_of_a_folder(files: dict[str, Path], folder: Path) -> None:
    with Running([files["one"], files["two"]], ServerConfig(lora_dir=str(folder)), LORA) as server:
        texts = [text(server, name) for name in ("one", "one:poet", "two", "two:cook")]
        assert len(set(texts)) == 4
        names = [card["id"] for card in server.ask("GET", "/v1/models").json["data"]]
        assert names == ["one", "two", "one:cook", "one:poet", "two:cook", "two:poet"]
        assert server.post(CHAT, {"messages": HELLO, "model": "poet"}).status == 404
        assert server.post(CHAT, {"messages": HELLO, "model": "two:poet"}).status == 400


def test_without_updates_there_is_no_route(files: dict[str, Path], folder: Path) -> None:
    with Running(files["one"], ServerConfig(lora_dir=str(folder)), LORA) as server:
        assert server.post(LOAD, {"lora_name": "x"}, ADMIN).status == 404


def test_metrics_are_sliced_by_adapter(server: Running) -> None:
    for name in ("base", "law", "law", "poet"):
        text(server, name)
    page = server.ask("GET", "/metrics").body.decode()
    for value, count in ("none", 1), ("law", 2), ("poet", 1):
        line = f'enginewright_sliced_requests_total{{model_name="base",slice="adapter",value="{value}"}} {count}.0'
        assert line in page, value


def test_routers_see_adapters_of_live_requests(files: dict[str, Path]) -> None:
    """The gauge that Kubernetes' inference gateway reads of vLLM."""
    config = ServerConfig(lora_modules=(f"law={files['lawyer']}", f"poet={files['poet']}"), metrics_compat="vllm")
    body = {"messages": HELLO, "max_tokens": 100, "ignore_eos": True, "stream": True}

    def shown(server: Running, running: str, waiting: str) -> bool:
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
        assert 'max_lora="1"' in line and abs(float(line.rpartition(" ")[2]) - time.time()) < 3600
        return f'running_lora_adapters="{running}"' in line and f'waiting_lora_adapters="{waiting}"' in line

    with Running(files["one"], config, {**LORA, "max_num_seqs": 1, "max_loras": 1}) as server:
        assert shown(server, "", "")
        is_running = server.held_steps(once=lambda llm: llm.stats().num_running == 1)
        with ThreadPoolExecutor(1) as clients, is_running, server.connect() as second:
            first = clients.submit(server.post, CHAT, {**body, "model": "poet"})
            server.until_held()  # in the first step of the first request, so that it cannot have ended
            server.send(second, CHAT, {**body, "model": "law"})
            wait_until(lambda: shown(server, "poet", "law"))
        assert first.result().status == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_modules": ("poet",)}, "NAME=FILE"),
        ({"lora_modules": ("=poet.lora",)}, "NAME=FILE"),
        ({"lora_dir": "/none/there"}, "no such folder"),
        ({"enable_lora_updates": True, "admin_keys": ("a",)}, "needs lora_dir and admin_keys"),
        ({"enable_lora_updates": True, "lora_dir": "."}, "needs lora_dir and admin_keys"),
        ({"admin_keys": (" ",)}, "API key"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ServerConfig(**settings)
