"""Two replicas of a real model in Ray Serve: APIs, aborts, a killed replica, a rolling replacement, routing."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.helpers.load import CLIENTS, Load
from tests.helpers.ray_serve import ENGINE, Deployment, ray_serve
from tests.helpers.serving import CHAT, tiny_engine, wait_until
from tests.long.test_route import ask

MODEL = "SmolLM2-135M-Instruct"
TWO: dict[str, Any] = {
    "engines": str(ENGINE),
    "replicas": 2,
    "kv_cache_memory": "128m",
    "max_num_seqs": 8,
    "max_model_len": 2048,
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with ray_serve() as opened:
        opened.deploy(**TWO)
        opened.wait_for_replicas(2)
        yield opened


def test_chat_and_streams(deployment: Deployment) -> None:
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}
    complete = deployment.ask("POST", CHAT, body, {"X-Request-Id": "mine"})
    assert complete.status == 200 and complete.headers["x-request-id"] == "mine"
    text = complete.json["choices"][0]["message"]["content"]
    assert "Paris" in text
    *chunks, end = deployment.ask("POST", CHAT, {**body, "stream": True}).events
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == text
    assert end == "[DONE]" and len(chunks) > 4


def test_other_apis_and_errors(deployment: Deployment) -> None:
    message = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
    assert deployment.ask("POST", "/v1/messages", message).json["content"][0]["text"]
    assert deployment.ask("GET", "/v1/models").json["data"][0]["id"] == MODEL
    assert deployment.ask("GET", "/health").json == {"status": "ok"}
    wrong = deployment.ask("POST", CHAT, {"messages": QUESTION, "temperature": "hot"})
    assert wrong.status == 400 and wrong.error["param"] == "temperature"
    assert deployment.ask("POST", CHAT, {"model": "other", "messages": QUESTION}).error["code"] == "model_not_found"
    assert deployment.ask("GET", "/nowhere").error["message"] == "there is no such route"
    assert deployment.ask("POST", "/v1/messages", {"model": MODEL}).json["type"] == "error"


def test_a_response_is_continued_where_it_is_kept(deployment: Deployment) -> None:
    for _ in range(4):  # at one of two replicas, each time
        first = deployment.ask("POST", "/v1/responses", {"input": "Say one.", "max_output_tokens": 16}).json
        body = {"input": "Say two.", "previous_response_id": first["id"], "max_output_tokens": 16}
        second = deployment.ask("POST", "/v1/responses", body)
        assert second.status == 200 and second.json["previous_response_id"] == first["id"]
        assert deployment.ask("GET", f"/v1/responses/{first['id']}").json["id"] == first["id"]
        assert deployment.ask("DELETE", f"/v1/responses/{first['id']}").status == 200
        assert deployment.ask("GET", f"/v1/responses/{first['id']}").status == 404


def test_a_client_that_leaves_stops_its_replica(deployment: Deployment) -> None:
    body = {"messages": QUESTION, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    before = sum(deployment.metric("generation_tokens_total").values())
    connection = HTTPConnection("127.0.0.1", deployment.port, timeout=600)
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().read(100)
    assert sum(deployment.metric("num_requests_running").values()) == 1
    connection.close()
    wait_until(lambda: sum(deployment.metric("num_requests_running").values()) == 0, 600)
    assert sum(deployment.metric("generation_tokens_total").values()) - before < 1900


def test_conversations_stay_with_their_replica(deployment: Deployment) -> None:
    """Second turns compute only the new part of their prompts, wherever the conversation began."""
    histories = [[{"role": "user", "content": f"{number} " + "word " * 200}] for number in range(6)]
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for history in histories:
        first = deployment.ask("POST", CHAT, {"messages": history, **options}).json
        history += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    for history in histories:
        usage = deployment.ask("POST", CHAT, {"messages": history, **options}).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 150
    assert min(deployment.metric("prompt_tokens_total").values()) > 300  # both replicas have some


def test_a_replica_is_killed_under_load(deployment: Deployment) -> None:
    """Streams that it had begun end with an error event; another replica answers everything else."""
    load = Load(partial(ask, deployment.port))
    with load.running():
        for _ in range(2):
            load.wait_for_more()
            os.kill(deployment.replicas()[0], signal.SIGKILL)
            load.wait_for_more()
            deployment.wait_for_replicas(2)
        load.wait_for_more()
    cut = load.outcomes.pop("cut: replica_lost", 0)
    assert set(load.outcomes) == {"whole", "stream"} and cut <= 2 * CLIENTS, load.outcomes


def test_a_rolling_replacement_fails_no_request(deployment: Deployment) -> None:
    before = set(deployment.replicas())
    load = Load(partial(ask, deployment.port))
    with load.running():
        load.wait_for_more()
        deployment.deploy(**TWO, max_num_waiting=512)  # a new version of the replicas
        load.wait_for_more()
    assert set(load.outcomes) == {"whole", "stream"}, load.outcomes
    wait_until(lambda: len(deployment.replicas()) == 2, 600)  # replaced ones end once they are idle
    assert not before & set(deployment.replicas())


def test_several_engines_and_tools(deployment: Deployment) -> None:
    """Each replica opens the engines that requests name, and the model that calls tools is one of them."""
    deployment.deploy(**{**TWO, "engines": [str(ENGINE), str(tiny_engine("calls tools"))]})
    names = [card["id"] for card in deployment.ask("GET", "/v1/models").json["data"]]
    assert {ENGINE.stem, "tiny"} <= set(names)
    tool = {"type": "function", "function": {"name": "population", "parameters": CITY}}
    body = {"model": "tiny", "messages": QUESTION, "tools": [tool], "tool_choice": "required", "max_tokens": 300}
    (call,) = deployment.ask("POST", CHAT, body).json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    events = deployment.ask("POST", CHAT, {**body, "stream": True}).events
    assert events[-1] == "[DONE]"
    assert any(chunk["choices"][0]["delta"].get("tool_calls") for chunk in events[:-1] if chunk["choices"])
    other = deployment.ask("POST", CHAT, {"model": ENGINE.stem, "messages": QUESTION, "max_tokens": 16})
    assert other.status == 200


def test_more_replicas_start_when_completions_wait(deployment: Deployment) -> None:
    scaled = {"replicas": 1, "max_replicas": 2, "target": 2, "upscale_delay_s": 0, "downscale_delay_s": 2}
    deployment.deploy(**{**TWO, **scaled})
    wait_until(lambda: len(deployment.replicas()) == 1, 600)
    load = Load(partial(ask, deployment.port))
    with load.running():
        deployment.wait_for_replicas(2)
        load.wait_for_more()
    wait_until(lambda: len(deployment.replicas()) == 1, 600)  # it drains: nothing was lost
    assert set(load.outcomes) == {"whole", "stream"}, load.outcomes
