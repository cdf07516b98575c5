"""The prefix cache that servers share, with processes of a real model and another project's S3 server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, SamplingParams
from tests.helpers.engines import built_tiny
from tests.helpers.kv_cache_disk import FAMILIES, LIMITS, answers_of
from tests.helpers.object_store import KEY, ObjectStore, object_store
from tests.helpers.run_process import Process

ENGINE = Path(__file__).parents[2] / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
PROMPT = [1000 + number * 7 % 5000 for number in range(1005)]
NUM_BLOCK_TOKENS = 992  # those of the full blocks before the last token


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    with object_store(tmp_path / "store") as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer of one server that shares nothing."""
    with alone(tmp_path_factory.mktemp("alone") / "log") as server:
        return server.complete(PROMPT)["choices"]


@contextmanager
def alone(log: Path, *options: str, environment: Mapping[str, str] = KEY) -> Iterator[Process]:
    assert ENGINE.is_file(), "run `make test-long`, which makes it"
    server = Process(ENGINE, log, *options, environment=environment)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def replica(store: ObjectStore, folder: Path, name: str, *options: str, **others: Any) -> Iterator[Process]:
    secret = folder / "secret"
    secret.write_text("s" * 32)
    sharing = ("--kv-cache-remote", store.url, "--kv-secret-file", str(secret))
    with alone(folder / f"{name}.log", *sharing, *options, **others) as server:
        yield server


def failures(server: Process) -> dict[str, float]:
    causes = ("unreachable", "refused", "failed", "damaged")
    found = {cause: server.metric("kv_cache_remote_failures_total", cause=cause) for cause in causes}
    return {cause: count for cause, count in found.items() if count}


def test_a_prefix_outlives_all_replicas(store: ObjectStore, tmp_path: Path, expected: Any) -> None:
    """The prefix is 1,000 tokens. Each of the next replicas fetches it, with another question after it."""
    with replica(store, tmp_path, "one") as one, replica(store, tmp_path, "two") as two:
        assert one.complete(PROMPT)["choices"] == expected
        other = two.complete([*PROMPT[:1000], 5, 6, 7])["choices"]
        assert two.metric("kv_cache_remote_tokens_total") in (0, NUM_BLOCK_TOKENS), "it may be there in time"
        assert failures(one) == failures(two) == {}
    assert store.objects and all(len(path.name) == 64 for path in store.objects)
    with replica(store, tmp_path, "three") as three, replica(store, tmp_path, "four") as four:
        for server in three, four:
            assert server.complete(PROMPT)["choices"] == expected
            assert server.metric("kv_cache_remote_tokens_total") == NUM_BLOCK_TOKENS
            assert server.complete([*PROMPT[:1000], 5, 6, 7])["choices"] == other
            assert failures(server) == {}


def test_a_tenant_never_reads_anothers(store: ObjectStore, tmp_path: Path) -> None:
    keys = ("--api-key", "one", "--api-key", "two")
    with replica(store, tmp_path, "first", *keys) as server:
        right = server.complete(PROMPT, key="one")["choices"]
    num_objects = len(store.objects)
    with replica(store, tmp_path, "second", *keys) as server:
        server.key = "two"
        assert server.complete(PROMPT, key="two")["choices"] == right
        assert server.metric("kv_cache_remote_received_bytes_total") == 0
        assert server.complete(PROMPT, key="one")["choices"] == right
        assert server.metric("kv_cache_remote_tokens_total") == NUM_BLOCK_TOKENS
    assert len(store.objects) > num_objects, "the other tenant has objects of its own"


@pytest.mark.parametrize("fault", ["denied", "silent", "gone", "tampered", "cut", "another instruction set"])
def test_faults_change_no_answer(fault: str, store: ObjectStore, tmp_path: Path, expected: Any) -> None:
    with replica(store, tmp_path, "first") as server:
        assert server.complete(PROMPT)["choices"] == expected
    if fault in ("tampered", "cut"):
        for path in store.objects:
            content = path.read_bytes()
            path.write_bytes(content[:-1] if fault == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    environment = KEY | ({"AWS_SECRET_ACCESS_KEY": "another"} if fault == "denied" else {})
    options = ("--isa", "portable") if fault == "another instruction set" else ()
    with replica(store, tmp_path, "second", *options, environment=environment) as server:
        if fault == "gone":
            store.process.kill()
            store.process.wait(30)
        if fault == "silent":
            with store.stopped():
                answer = server.complete(PROMPT)["choices"]
        else:
            answer = server.complete(PROMPT)["choices"]
        assert options or answer == expected
        assert server.metric("kv_cache_remote_tokens_total") == 0
        if fault == "another instruction set":
            assert failures(server) == {} and server.metric("kv_cache_remote_found_total") == 0
            return
        (cause,) = failures(server)
        assert cause == {"denied": "refused", "tampered": "damaged", "cut": "damaged"}.get(fault, "unreachable")
        assert server.log.count("the shared KV cache cannot be used, and prompts are computed") == 1


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_every_kind_of_cache(family: str, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of attention, windows, recurrent states and latents, bitwise the same with their log-probabilities."""
    for name, value in KEY.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "secret").write_text("s" * 32)
    engine, params = built_tiny(family, max_position_embeddings=256), SamplingParams(seed=7, max_tokens=20, logprobs=3)
    limits = {"kv_cache_remote": store.url, "kv_secret_file": str(tmp_path / "secret"), **LIMITS}
    prompts = [[token * seed % 250 for token in range(70)] for seed in range(1, 4)]
    with LLM(engine, enable_prefix_caching=False, **LIMITS) as llm:
        right = answers_of(llm.generate(prompts, params))
    for restored in 0, 3 * 64:
        with LLM(engine, **limits) as llm:
            assert answers_of(llm.generate(prompts, params)) == right
            stats = llm.stats()
            assert stats.restored_tokens == restored
            assert stats.remote is not None and not any(stats.remote.failures.values())
