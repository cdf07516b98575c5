"""A small endpoint picker and the routing sidecar of pods that decode, by the documents of llm-d's router 0.10.

The picker reads what the model server protocol names: gauges for the queue, running requests and KV use, labels of the
cache's configuration, and KV events. Its scorers are llm-d's, and their weights ours. The sidecar
sends a prompt to the prefiller that the picker's header names, in the form of its connector `nixlv2`.

https://github.com/llm-d/llm-d-router/blob/main/docs/model-server-protocol.md, docs/disaggregation.md
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPConnection
from typing import Any

import msgspec
import zmq
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.serving import wait_until

PREFILLER = "x-prefiller-host-port"
QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
# Names of metrics by the pod's label llm-d.ai/engine-type, as core-metrics-extractor has them: queue, running, KV use.
GAUGES = {"vllm": ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")}
CACHE_INFO = {"vllm": ("vllm:cache_config_info", "block_size", "num_gpu_blocks")}
PREFILL_ROLES, DECODE_ROLES = ("prefill", "prefill-decode"), ("decode", "prefill-decode", None)


def send(address: str, path: str, body: Any, headers: Mapping[str, str] = {}) -> tuple[int, bytes]:
    """Sends a request to host:port, and returns status and body; None as a body makes it a GET."""
    connection = HTTPConnection(address, timeout=120)
    try:
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass(frozen=True)
class Load:
    """Figures from a scrape of an endpoint."""

    queued: float
    running: float
    kv_usage: float  # 0 to 1
    block_size: int
    num_blocks: int


@dataclass
class Endpoint:
    """A pod of the pool, as the picker knows it."""

    address: str  # host:port of the pool's target port
    labels: Mapping[str, str]
    # The picker's own keys of blocks that the pod has cached, by the hashes of its events.
    keys: dict[int, bytes] = field(default_factory=dict)
    next_number: int = 0  # number of the next batch of events

    @property
    def role(self) -> str | None:
        return self.labels.get("llm-d.ai/role")

    def load(self) -> Load:
        """Scrapes /metrics at the target port, without credentials."""
        status, text = send(self.address, "/metrics", None)
        assert status == 200, text
        engine = self.labels["llm-d.ai/engine-type"]
        families = {one.name: one for one in text_string_to_metric_families(text.decode())}
        values = []
        for name in GAUGES[engine]:
            assert families[name].type == "gauge", name
            (sample,) = families[name].samples
            values.append(sample.value)
        name, block_size, num_blocks = CACHE_INFO[engine]
        (info,) = families[name].samples
        return Load(*values, int(info.labels[block_size]), int(info.labels[num_blocks]))

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        """Follows the events of one batch, of the first group of layers."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.keys.clear()
            elif event.get("group_idx", 0) == 0 and event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.keys[block]
            elif event.get("group_idx", 0) == 0:
                size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
                salts = [extra for extra in event["extra_keys"] if extra]
                key = self.keys[parent] if parent is not None else root_key(salts[0] if salts else ())
                for number, block in enumerate(event["block_hashes"]):
                    key = next_key(key, tokens[number * size : (number + 1) * size])
                    self.keys[block] = key

    def matched(self, keys: Sequence[bytes]) -> int:
        """Number of leading blocks that the pod has cached."""
        there = set(self.keys.values())
        return next((count for count, key in enumerate(keys) if key not in there), len(keys))


def root_key(extra: Sequence[str]) -> bytes:
    """The picker's key before the first block, which depends on the salt."""
    return sha256(json.dumps(list(extra)).encode()).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """The picker's key of a block after another one."""
    return sha256(key + json.dumps(list(tokens)).encode()).digest()


class Subscriber:
    """A subscription to the KV events of one endpoint: what is kept first, then what is published."""

    def __init__(self, endpoint: Endpoint, events: str, replay: str) -> None:
        self._endpoint, self._replay, self._context = endpoint, replay, zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"kv@")
        self._socket.connect(events)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def catch_up(self) -> None:
        """Requests all that follows what is known, as a subscriber does that has missed messages."""
        with self._context.socket(zmq.DEALER) as request:
            request.rcvtimeo, request.linger = 30_000, 0
            request.connect(self._replay)
            request.send_multipart([b"", self._endpoint.next_number.to_bytes(8, "big")])
            while True:
                _, number, payload = request.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    return
                self._take(number, payload)

    def poll(self, timeout_ms: int = 0) -> None:
        """Takes what was published."""
        while self._socket.poll(timeout_ms):
            topic, number, payload = self._socket.recv_multipart()
            host, _, model = topic.decode().removeprefix("kv@").partition("@")
            assert host and model, topic
            if int.from_bytes(number, "big") > self._endpoint.next_number:
                self.catch_up()
            self._take(number, payload)

    def follow(self, until: Callable[[Endpoint], bool]) -> None:
        """Takes what is published, until the endpoint is known well enough."""

        def is_known() -> bool:
            self.poll(10)
            return until(self._endpoint)

        wait_until(is_known)

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") == self._endpoint.next_number:
            _, events, _ = msgspec.msgpack.decode(payload)
            self._endpoint.apply(events)
            self._endpoint.next_number += 1


@dataclass
class Picker:
    """Chooses an endpoint for each request, and a prefiller where that pays."""

    endpoints: Sequence[Endpoint]
    min_remote_tokens: int = 1 << 30  # tokens that the decoding pod lacks, from which a prefiller is chosen

    def keys(self, body: Mapping[str, Any], block_size: int) -> list[bytes]:
        """The picker's keys of a prompt's full blocks, but for its last token."""
        tokens = body.get("prompt")
        if not isinstance(tokens, list):
            asked = {key: body[key] for key in ("prompt", "messages") if key in body}
            tokens = json.loads(send(self.endpoints[0].address, "/tokenize", asked)[1])["tokens"]
        salt = body.get("cache_salt")
        key, keys = root_key([salt] if salt else ()), []
        for start in range(0, len(tokens) - block_size, block_size):
            key = next_key(key, tokens[start : start + block_size])
            keys.append(key)
        return keys

    def scores(self, body: Mapping[str, Any], among: Sequence[Endpoint]) -> list[float]:
        """The weighted sum of the scorers for each endpoint; each scorer gives 0 to 1."""
        loads = [endpoint.load() for endpoint in among]
        most, least = max(one.queued for one in loads), min(one.queued for one in loads)
        keys = self.keys(body, loads[0].block_size)
        found = []
        for endpoint, load in zip(among, loads, strict=True):
            queue = (most - load.queued) / (most - least) if most > least else 1.0
            prefix = endpoint.matched(keys) / len(keys) if keys else 0.0
            found.append(QUEUE_WEIGHT * queue + KV_WEIGHT * (1 - load.kv_usage) + PREFIX_WEIGHT * prefix)
        return found

    def _best(self, body: Mapping[str, Any], roles: Sequence[str | None]) -> Endpoint:
        among = [endpoint for endpoint in self.endpoints if endpoint.role in roles]
        scores = self.scores(body, among)
        return among[scores.index(max(scores))]

    def pick(self, body: Mapping[str, Any]) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint that gets the request, and the headers that are added."""
        decode = self._best(body, DECODE_ROLES)
        block_size = decode.load().block_size
        keys = self.keys(body, block_size)
        if (len(keys) - decode.matched(keys)) * block_size < self.min_remote_tokens:
            return decode, {}
        return decode, {PREFILLER: self._best(body, PREFILL_ROLES).address}


def through_sidecar(
    decoder: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[int, bytes, Any]:
    """Answers a request as the sidecar of a pod that decodes; also returns the parameters of the transfer."""
    prefiller = headers.get(PREFILLER)
    if prefiller is None:
        return *send(decoder, path, body), None
    id = {"x-request-id": str(uuid.uuid4())}
    wanted: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    wanted |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    prefill = {key: value for key, value in body.items() if key not in ("min_tokens", "stream_options")}
    prefill |= {"kv_transfer_params": wanted, "stream": False, "max_tokens": 1}
    if path == "/v1/chat/completions":
        prefill["max_completion_tokens"] = 1
    status, data = send(prefiller, path, prefill, id)
    if status >= 400:
        return status, data, None
    params = json.loads(data).get("kv_transfer_params")
    return *send(decoder, path, {**body, "kv_transfer_params": params}, id), params
