"""Servers as endpoints of an inference pool: what a picker reads of them, and prefill and decode by its header."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.config import ServerConfig
from tests.helpers.picker import PREFILLER, Endpoint, Picker, Subscriber, send, through_sidecar
from tests.helpers.serving import CHAT, COMPLETIONS, Running, running, tiny_engine, wait_until
from tests.house.test_deploy import pod

LIMITS = {"max_num_seqs": 2, "kv_cache_memory": 1 << 20, "max_model_len": 512}
LABELS = pod(inferencePool={"name": "pool"})["metadata"]["labels"]  # those of the chart


class Pool:
    """Two servers with KV events, and a picker that follows them."""

    def __init__(self, servers: list[Running], folder: Path) -> None:
        self.servers = servers
        self.endpoints = [Endpoint(f"127.0.0.1:{server.port}", LABELS) for server in servers]
        self.picker = Picker(self.endpoints)
        self.subscribers = [
            Subscriber(endpoint, f"ipc://{folder}/{place}", f"ipc://{folder}/{place}.replay")
            for place, endpoint in enumerate(self.endpoints)
        ]

    def follow(self) -> None:
        """Takes all events of the steps so far."""
        for subscriber, server in zip(self.subscribers, self.servers, strict=True):
            wait_until(server.is_idle)
            num_blocks = len(server.llm._core._scheduler._cache._kinds[0].pool._published)  # type: ignore[union-attr]
            subscriber.catch_up()
            subscriber.follow(lambda endpoint, num_blocks=num_blocks: len(endpoint.keys) == num_blocks)  # type: ignore[misc]

    def pick(self, prompt: list[int], **keys: Any) -> int:
        return self.endpoints.index(self.picker.pick({"prompt": prompt, **keys})[0])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    def server(place: int) -> Any:
        events = {"kv_events": f"ipc://{tmp_path}/{place}", "kv_events_replay": f"ipc://{tmp_path}/{place}.replay"}
        topic = {"kv_events_topic": f"kv@10.0.0.{place}:8000@tiny"}
        return running(limits=LIMITS | events | topic, metrics_compat="vllm")

    with server(0) as first, server(1) as second:
        found = Pool([first, second], tmp_path)
        yield found
        for subscriber in found.subscribers:
            subscriber.close()


def prompt(number: int, length: int = 100) -> list[int]:
    return [3 + number, *(5 + place % 90 for place in range(length - 1))]


def test_the_picker_reads_queue_and_kv_use(pool: Pool) -> None:
    """A server that is full and has a queue gets nothing more, if it has no prefix of the prompt."""
    first = pool.servers[0]
    first.complete(prompt(0), max_tokens=1)
    pool.follow()
    idle = pool.endpoints[0].load()
    (group,) = first.llm.engine.plan.caches
    assert (idle.queued, idle.running, idle.kv_usage) == (0, 0, 0)
    assert (idle.block_size, (idle.num_blocks,)) == (group.block_size, first.llm.memory_plan.num_blocks)  # type: ignore[union-attr]
    assert pool.pick(prompt(0)) == pool.pick(prompt(9)) == 0, "of equal ones, the first"
    with ThreadPoolExecutor(1) as clients, first.held_steps(once=lambda llm: llm.stats().num_running == 2) as free:
        body = {"prompt": prompt(1, 200), "n": 5, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
        sent = clients.submit(first.post, COMPLETIONS, body)  # two answers run, and three wait
        wait_until(lambda: pool.endpoints[0].load().running == 2)
        busy = pool.endpoints[0].load()
        assert busy.queued == 3 and busy.kv_usage > 0
        assert pool.pick(prompt(9)) == 1, "three wait"
        free.set()
        assert sent.result().status == 200
    assert pool.endpoints[0].load().queued == 0


def test_the_picker_follows_the_prefix_cache(pool: Pool) -> None:
    second = pool.servers[1]
    conversation = prompt(7)
    for turn in range(4):
        choice = pool.pick(conversation)
        assert turn == 0 or choice == 1, "the server that has the conversation"
        answer = second.complete(conversation, max_tokens=8)
        conversation = [*conversation, *prompt(turn, 40)]
        pool.follow()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 or turn == 0
    assert pool.pick(conversation, cache_salt="other") == pool.pick(prompt(8)), "no prefix of another salt"
    second.complete(conversation, max_tokens=1, cache_salt="salt")
    pool.follow()
    keys = pool.picker.keys({"prompt": conversation, "cache_salt": "salt"}, pool.endpoints[1].load().block_size)
    assert pool.endpoints[1].matched(keys) == len(keys) > 3
    for number in range(10, 40):  # other prompts evict it
        second.complete(prompt(number, 400), max_tokens=1)
    pool.follow()
    assert pool.endpoints[1].matched(keys) == 0 == pool.pick(conversation)


def test_a_chat_is_found_by_its_tokens(pool: Pool) -> None:
    """The picker tokenizes with the servers' own template."""
    messages = [{"role": "user", "content": "word " * 60}]
    pool.servers[1].chat(messages, max_tokens=1)
    pool.follow()
    picked, headers = pool.picker.pick({"messages": messages})
    assert picked is pool.endpoints[1] and headers == {}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prefill_and_decode_by_the_pickers_header(path: str, tmp_path: Path) -> None:
    """A long prompt goes through a prefiller, with the same answer; a short one, and one that is cached, do not."""
    (tmp_path / "secret").write_text("a secret of the test, long enough\n")
    limits = {"kv_secret_file": str(tmp_path / "secret")}
    config = ServerConfig(metrics_compat="vllm")
    with (
        Running(tiny_engine(), config, limits | {"kv_role": "prefill"}) as prefill,
        Running(tiny_engine(), config, limits | {"kv_role": "decode"}) as decode,
    ):
        endpoints = [
            Endpoint(f"127.0.0.1:{server.port}", LABELS | {"llm-d.ai/role": role})
            for server, role in ((prefill, "prefill"), (decode, "decode"))
        ]
        picker = Picker(endpoints, min_remote_tokens=64)
        body: dict[str, Any] = {"max_tokens": 8, "min_tokens": 2, "seed": 3, "temperature": 1.0, "ignore_eos": True}
        if path == COMPLETIONS:
            body |= {"prompt": prompt(1, 150), "logprobs": 2}
        else:
            body |= {"messages": [{"role": "user", "content": "x " * 99}], "logprobs": True}
        alone = json.loads(send(endpoints[1].address, path, {**body, "cache_salt": "alone"})[1])
        picked, headers = picker.pick(body)
        assert picked is endpoints[1] and headers == {PREFILLER: endpoints[0].address}
        status, data, params = through_sidecar(picked.address, path, body, headers)
        assert status == 200 and params["do_remote_prefill"], data
        assert json.loads(data)["choices"] == alone["choices"]
        stats = decode.llm.stats()
        assert stats.transfer is not None and stats.transfer.num_received_bytes > 0 == stats.transfer.num_failures
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "stream"}
        status, data, params = through_sidecar(picked.address, path, streamed, headers)
        assert status == 200 and params is not None and data.endswith(b"data: [DONE]\n\n")
        short = {"prompt": [5, 6], "max_tokens": 2}
        assert picker.pick(short) == (endpoints[1], {})
        status, _, params = through_sidecar(picked.address, COMPLETIONS, short, headers)
        assert status == 200 and params is None, "nothing to lease, and null is no transfer"
