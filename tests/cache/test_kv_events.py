"""Events of the KV cache over ZeroMQ: a subscriber that follows them knows which blocks there are."""

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import kv_events
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve
from tests.helpers.engines import built_tiny
from tests.helpers.serving import running, tiny_engine

Event = dict[str, Any]
Batch = tuple[int, float, list[Event], int]  # sequence number, time, events, rank
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}
FIELDS = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
FIELDS += ["extra_keys", "group_idx", "kv_cache_spec_kind"]


def asked_again(address: str, first: int = 0) -> list[Batch]:
    """Everything from a number on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as request:  # to a REQ socket, only the first would come
        request.rcvtimeo, request.linger = 10_000, 0
        request.connect(address)
        request.send_multipart([b"", first.to_bytes(8, "big")])
        batches = list[Batch]()
        while True:
            empty, number, payload = request.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append(decoded(number, payload))


def decoded(number: bytes, payload: bytes) -> Batch:
    assert len(number) == 8
    at, events, rank = msgspec.msgpack.decode(payload)
    return int.from_bytes(number, "big"), at, events, rank


class Router:
    """A subscriber's knowledge of the cache: hashes of the blocks that exist, by group."""

    def __init__(self) -> None:
        self.there: dict[int, set[int]] = {}
        self.removed = 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            known = self.there.setdefault(event.get("group_idx", 0), set())
            if event["type"] == "AllBlocksCleared":
                assert list(event) == ["type"]
                self.there.clear()
            elif event["type"] == "BlockRemoved":
                assert list(event) == ["type", "block_hashes", "medium", "group_idx"]
                assert known.issuperset(event["block_hashes"])
                known.difference_update(event["block_hashes"])
                self.removed += len(event["block_hashes"])
            else:
                assert event["type"] == "BlockStored" and list(event)[: len(FIELDS)] == FIELDS
                assert not known.intersection(event["block_hashes"])
                assert len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                assert len(event["extra_keys"]) == len(event["block_hashes"])
                known.update(event["block_hashes"])


def in_cache(llm: LLM) -> dict[int, set[int]]:
    kinds = llm._core._scheduler._cache._kinds  # type: ignore[union-attr]
    return {group: {kv_events.block_hash(key) for key in kind.pool._published} for group, kind in enumerate(kinds)}


@contextmanager
def followed(engine: Path, tmp_path: Path, **limits: Any) -> Iterator[tuple[LLM, str]]:
    """An engine with events, and where to ask for them."""
    replay = f"ipc://{tmp_path}/replay"
    with LLM(engine, kv_events=f"ipc://{tmp_path}/events", kv_events_replay=replay, **LIMITS, **limits) as llm:
        yield llm, replay


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 12) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ["full_attention"]),
        ("mistral", ["sliding_window"]),
        ("deepseek_v3", ["mla_attention"]),
        ("falcon_h1", ["full_attention", "mamba"]),
    ],
)
def test_who_follows_knows_what_is_there(family: str, kinds: list[str], tmp_path: Path) -> None:
    """A subscriber's knowledge is right in a cache so small that prompts evict each other's blocks."""
    draw = random.Random(1)
    starts = [[draw.randrange(3, 300) for _ in range(70)] for _ in range(4)]
    prompts = [[*draw.choice(starts)[: draw.randrange(20, 71)], *draw.choices(range(3, 300), k=30)] for _ in range(24)]
    with followed(built_tiny(family, max_position_embeddings=256), tmp_path, kv_cache_memory="400k") as (llm, replay):
        for first in range(0, 24, 6):
            generate(llm, prompts[first : first + 6])
            router, stored = Router(), list[Event]()
            batches = asked_again(replay)
            for _, _, events, _ in batches:
                router.take(events)
                stored += [event for event in events if event["type"] == "BlockStored"]
            there = in_cache(llm)
            assert {group: router.there.get(group, set()) for group in there} == there and all(there.values())
        assert [number for number, *_ in batches] == list(range(len(batches)))
        assert all(abs(at - time.time()) < 600 and rank == 0 for _, at, _, rank in batches)
        assert batches[0][2] == [{"type": "AllBlocksCleared"}] and router.removed > 0
        assert asked_again(replay, 3) == batches[3:] and asked_again(replay, 10_000) == []
    assert sorted({event["kv_cache_spec_kind"] for event in stored}) == kinds
    if "sliding_window" in kinds:
        assert {event["kv_cache_spec_sliding_window"] for event in stored} == {7}


def test_hashes_are_chained_and_salted(tmp_path: Path) -> None:
    """An event says all that a block's hash depends on."""
    prompt = list(range(3, 103))
    with followed(tiny_engine(), tmp_path, kv_cache_memory="1m") as (llm, replay):
        generate(llm, [prompt])
        salted = {"prompt_token_ids": prompt, "cache_salt": "of one client"}
        llm.generate([salted], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), use_tqdm=False)
        stored = [event for *_, events, _ in asked_again(replay) for event in events if event["type"] == "BlockStored"]
    chains = dict[int, tuple[str, list[int], list[int]]]()  # by the last hash: salt, tokens, hashes
    for event in stored:
        parent, hashes = event["parent_block_hash"], event["block_hashes"]
        salt, tokens, before = chains[parent] if parent is not None else ((event["extra_keys"][0] or [""])[0], [], [])
        chains[hashes[-1]] = salt, tokens + event["token_ids"], before + hashes
    whole = [chain for chain in chains.values() if len(chain[1]) >= 100 // event["block_size"] * event["block_size"]]
    assert {salt for salt, *_ in whole} == {"", "of one client"}
    for salt, tokens, hashes in whole:
        assert tokens[:90] == prompt[:90]
        keys = PrefixKeys(event["block_size"], salt).of(tokens, len(hashes))
        assert hashes == [kv_events.block_hash(key) for key in keys]
    generated = max(len(tokens) for _, tokens, _ in whole)
    assert generated > len(prompt), "blocks of an answer are told of, too"


def test_a_subscriber_of_a_server(tmp_path: Path) -> None:
    """A subscriber gets the events of each step at once, under the topic, and at the end that no block is left."""
    address = f"ipc://{tmp_path}/events"
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.rcvtimeo, subscriber.linger = 10_000, 0
        subscriber.subscribe("kv@here@tiny")
        subscriber.connect(address)
        limits = {"kv_events": address, "kv_events_topic": "kv@here@tiny"}
        router = Router()
        with running(limits=limits) as server:
            while not any(router.there.values()):  # until the subscription has arrived
                server.complete([random.randrange(3, 300) for _ in range(80)], max_tokens=3)
                while subscriber.poll(200):
                    topic, number, payload = subscriber.recv_multipart()
                    assert topic == b"kv@here@tiny"
                    router.take(decoded(number, payload)[2])
        topic, number, payload = subscriber.recv_multipart()
        assert decoded(number, payload)[2] == [{"type": "AllBlocksCleared"}]


def test_lost_batches_clear_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that stands still keeps nobody waiting, and subscribers never believe more than there is."""
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 2)
    stands_still, replay = threading.Event(), f"ipc://{tmp_path}/replay"
    read = os.eventfd_read  # by which the sender is woken
    monkeypatch.setattr(os, "eventfd_read", lambda fd: stands_still.wait(30) and read(fd))
    with followed(tiny_engine(), tmp_path, kv_cache_memory="1m") as (llm, _):
        generate(llm, [list(range(3, 103))], max_tokens=100)
        stands_still.set()
        events = list[Event]()
        while [event["type"] for event in events].count("AllBlocksCleared") < 2:
            events = [event for *_, events, _ in asked_again(replay) for event in events]
        router = Router()
        router.take(events)
        assert not any(router.there.values()) and len(events) > 2


def test_a_replay_asked_for_wrongly(tmp_path: Path) -> None:
    with followed(tiny_engine(), tmp_path) as (llm, replay):
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(replay)
            for parts in ([b"x"], [b"", b"1234567"], [b"", b"12345678", b""], [b"x", b"12345678"]):
                client.send_multipart(parts)
            assert not client.poll(200)
        generate(llm, [list(range(3, 63))])
        assert len(asked_again(replay)) > 1


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/events"
    with pytest.raises(UsageError, match="goes with a prefix cache"):
        LLM(tiny_engine(), kv_events=address, enable_prefix_caching=False)
    with pytest.raises(UsageError, match="need kv_events"):
        RuntimeConfig(kv_events_replay=address)
    with pytest.raises(UsageError, match="KV events cannot listen at tcp://\\*:99999"):
        LLM(tiny_engine(), kv_events="tcp://*:99999")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        replay = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen at {replay}: address already in use"):
            LLM(tiny_engine(), kv_events="tcp://*:*", kv_events_replay=replay)
    with pytest.raises(UsageError, match="one engine: 2 cannot share an address"):
        serve([tiny_engine(), built_tiny("llama")], ServerConfig(port=0), kv_events=address)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(EngineError, match=r"pyzmq is not installed[\s\S]*enginewright\[events\]"):
        LLM(tiny_engine(), kv_events=address)
