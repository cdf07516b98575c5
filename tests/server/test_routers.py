"""Answers to routers of other projects: token ids of prompts, facts and load. tests/long has the routers themselves."""

from typing import Any

import pytest

from enginewright import __version__
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LENGTH, Running, running, tiny_engine, wait_until

SERVER = {"served_model_names": ("tiny", "other"), "kind": "calls tools", "strict_keys": True}
RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
# Keys that vllm-router and smg add to every chat.
ADDED = {
    "continue_final_message": False,
    "ignore_eos": False,
    "include_reasoning": True,
    "logprobs": False,
    "no_stop_trim": False,
    "return_hidden_states": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "stream": False,
    "stream_reasoning": True,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, **ADDED}),
        (CHAT, {"messages": [{"role": "system", "content": "Be brief"}, *HELLO], "tools": TOOLS, "model": "other"}),
        (CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "stream": True}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}),
        (RESPONSES, {"input": "Größe 🙂", "instructions": "Be brief"}),
        (RESPONSES, {"input": [{"role": "user", "content": "Hello"}], "tools": [{"type": "function", "name": "f"}]}),
        (COMPLETIONS, {"prompt": "The capital of Größe 🙂"}),
        (COMPLETIONS, {"prompt": [5, 7, 11], "echo": True}),
    ],
)
def test_what_is_rendered_is_what_the_model_reads(server: Running, path: str, body: dict[str, Any]) -> None:
    rendered = server.post(f"{path}/render", body).json
    if path == COMPLETIONS:
        (rendered,) = rendered
    ids = rendered["token_ids"]
    assert rendered.keys() == {"request_id", "model", "token_ids", "features"} and rendered["features"] is None
    assert rendered["model"] == body.get("model", "tiny")
    by_ids = {"prompt": ids, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    one = server.post(COMPLETIONS, by_ids).json
    length = {"max_output_tokens": 12} if path == RESPONSES else {"max_tokens": 12}
    same = server.post(path, {**body, **length, "ignore_eos": True, "stream": False}).json
    usage = same["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(ids) == one["usage"]["prompt_tokens"]
    # The prompt is found in the prefix cache, so these were the ids.
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    assert details["cached_tokens"] == (len(ids) - 1) // 32 * 32


def test_several_prompts_are_a_list(server: Running) -> None:
    prompts = ["one", "two two"]
    rendered = server.post(f"{COMPLETIONS}/render", {"prompt": prompts}).json
    apart = [server.post("/tokenize", {"prompt": prompt}).json["tokens"] for prompt in prompts]
    assert [one["token_ids"] for one in rendered] == apart
    assert len({one["request_id"] for one in rendered}) == 2


def test_a_kept_response_is_rendered_with_what_precedes_it(server: Running) -> None:
    first = server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 4, "ignore_eos": True}).json
    body = {"input": "And?", "previous_response_id": first["id"]}
    rendered = server.post(f"{RESPONSES}/render", body).json
    whole = server.post(RESPONSES, {**body, "max_output_tokens": 1}).json
    assert len(rendered["token_ids"]) == whole["usage"]["input_tokens"]
    assert server.ask("GET", f"{RESPONSES}/render").status == 404  # render is not the id of a response


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": HELLO, "model": "none"}, 404, "model"),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
        (CHAT, {"messages": HELLO, "unknown": 1}, 400, "unknown"),
        (CHAT, {"messages": HELLO, "return_hidden_states": True}, 400, "return_hidden_states"),
        (CHAT, {"messages": HELLO, "separate_reasoning": False}, 400, "separate_reasoning"),
        (CHAT, {"messages": HELLO, "no_stop_trim": True}, 400, "no_stop_trim"),
        (CHAT, {"messages": HELLO, "stream_reasoning": False}, 400, "stream_reasoning"),
        (COMPLETIONS, {"prompt": [307]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 4_000_000}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["x", [5] * (LENGTH + 1)]}, 400, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * LENGTH}]}, 400, "messages"),
        (RESPONSES, {"input": "x " * LENGTH}, 400, "input"),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}, 400, "previous_response_id"),
    ],
)
def test_what_is_refused_is_not_rendered_either(
    server: Running, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    rendered, answer = server.post(f"{path}/render", body), server.post(path, body)
    assert (rendered.status, rendered.error["param"]) == (status, param), rendered.body
    assert rendered.error == answer.error


def test_an_idle_server_has_no_load(server: Running) -> None:
    wait_until(server.is_idle)
    assert server.ask("GET", "/get_load").json == {"load": 0}
    answer = server.ask("GET", "/v1/loads?include=core,disagg,queues,memory").json
    assert answer["dp_rank_count"] == 1 and answer["version"] == __version__ and answer["timestamp"]
    (load,) = answer["loads"]
    assert (load["num_total_reqs"], load["num_used_tokens"], load["token_usage"]) == (0, 0, 0)
    assert load["max_running_requests"] == 8 and load["max_total_num_tokens"] > LENGTH


def test_the_load_of_a_busy_server() -> None:
    """One sequence runs, with two blocks or more, and one waits for its place."""
    with running(limits={"max_num_seqs": 1}) as server:
        rest = server.begin(COMPLETIONS, {"prompt": [5] * 40, "max_tokens": 500, "ignore_eos": True})
        with server.held_steps(lambda llm: llm._core.stats().num_waiting == 1) as free, server.connect() as waiting:
            server.send(waiting, COMPLETIONS, {"prompt": [7] * 10, "max_tokens": 1})
            server.until_held()
            assert server.ask("GET", "/get_load").json == {"load": 2}
            (load,) = server.ask("GET", "/v1/loads").json["loads"]
            free.set()
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")
        assert rest().status == 200
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_waiting_uncached_tokens"]) == (1, 1, 10)
        assert load["num_used_tokens"] >= 64 and load["max_running_requests"] == 1
        assert load["token_usage"] == round(load["num_used_tokens"] / load["max_total_num_tokens"], 4)


@pytest.mark.parametrize("path", ["/server_info?config_format=json", "/get_server_info"])
def test_facts_of_an_engine(server: Running, path: str) -> None:
    info = server.ask("GET", path).json
    (load,) = server.ask("GET", "/v1/loads").json["loads"]
    assert (info["model_path"], info["served_model_name"], info["version"]) == ("tiny", "tiny", __version__)
    assert (info["context_length"], info["max_running_requests"]) == (LENGTH, 8)
    assert info["max_total_tokens"] == load["max_total_num_tokens"]
    config = info["vllm_config"]
    assert config["model_config"]["served_model_name"] == ["tiny", "other"]
    assert config["cache_config"]["block_size"] == 32
    assert config["cache_config"]["num_gpu_blocks"] * 32 == info["max_total_tokens"]


def test_several_engines() -> None:
    """Facts are those of the engine that the query names; a closed one has no cache, and no load."""
    files = [tiny_engine(), tiny_engine("thinks")]
    names = ("first", "second")
    for file, name in zip(files, names, strict=True):
        (file.parent / f"{name}.engine").unlink(missing_ok=True)
        (file.parent / f"{name}.engine").symlink_to(file)
    with running(engine=[file.parent / f"{name}.engine" for file, name in zip(files, names, strict=True)]) as server:
        assert server.ask("GET", "/server_info").error["param"] == "model"
        assert server.ask("GET", "/server_info?model=third").status == 404
        assert server.ask("GET", "/server_info?model=second").json["max_total_tokens"] is None
        assert server.ask("GET", "/v1/loads").json["loads"][0]["max_total_num_tokens"] == 0
        server.chat(model="second")
        info = server.ask("GET", "/server_info?model=second").json
        (load,) = server.ask("GET", "/v1/loads").json["loads"]
        assert info["model_path"] == "second" and info["context_length"] == LENGTH
        assert info["max_total_tokens"] == load["max_total_num_tokens"] > 0
