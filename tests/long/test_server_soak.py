"""25,000 requests of which most are hostile, with disconnects, against one server in a process of its own; and 10,000
that ask for tools, schemas, stops and streams where few KV blocks are, whose every answer has to be the right one.
"""

import asyncio
import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Answer,
    Running,
    head_of,
    port_of,
    process,
    running,
    wait_until,
)

NUM_REQUESTS = 25_000
NUM_MIXED = 10_000
WORKERS = 8
MAX_HEALTH_S = 0.5
HEALTH = head_of("GET /health", "Connection: close")
WARM_UP = 0.2  # of the requests, before memory and descriptors are looked at

Send = tuple[bytes, float | None]  # what is sent, and after how many seconds the client leaves; None: when answered


def post(path: str, body: Any, connection: str = "close") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = "Content-Type: application/json", f"Content-Length: {len(data)}", f"Connection: {connection}"
    return head_of(f"POST {path}", *headers) + data


def chat(random: random.Random) -> Any:
    keys = ["tool_calls", "name", "audio", "refusal", "annotations", "x", "reasoning_content", "function_call"]
    values = [None, [], 5, "x", [1], {"a": [{}]}, True, "\ud800", 1e308]
    message = {"role": random.choice(["user", "assistant", "tool", "", "king"]), "content": "x" * random.randrange(40)}
    message |= {random.choice(keys): random.choice(values) for _ in range(random.randrange(3))}
    kwargs = random.choice([{}, {"enable_thinking": False}, {"messages": []}, {"x": {"y": [1] * 100}}])
    return {"messages": [*HELLO, message], "max_tokens": 3, "chat_template_kwargs": kwargs}


def options(random: random.Random) -> Any:
    choices: list[dict[str, Any]] = [
        {"temperature": random.choice([-1, 0, 1e308, "hot", None])},
        {"n": random.choice([0, 1, 5, 129, 10**9])},
        {"max_tokens": random.choice([-1, 0, 1, 10**12])},
        {"logprobs": random.choice([0, 20, 21]), "echo": True, "n": 3},
        {"prompt_logprobs": 5, "max_tokens": 0},
        {"logprobs": 20, "n": 128, "max_tokens": 4000},
        {"stop": ["a" * random.randrange(5000)] * random.randrange(1, 70)},
        {"allowed_token_ids": list(range(random.choice([1, 300, 3000]))), "n": 128},
        {"logit_bias": {str(random.randrange(400)): random.choice([0, 100, 1e9])}},
        {"stop_token_ids": [random.choice([5, 306, 307, -1])]},
        {"seed": 2**70, "min_tokens": 3},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_tokens": 8},
        {"guided_json": {}, "tools": [{}], "tool_choice": "none"},
    ]
    return {"prompt": "hello", "max_tokens": 3, **random.choice(choices)}


def bytes_of_body(random: random.Random) -> bytes:
    hostile = [b"1e999", b'"\\ud800"', b'"\xff"', b"9" * 5000, b"[" * 2000, b"NaN", b'{"a": [1e999]}', b"[[]]" * 9, b""]
    templates = [
        b'{"prompt": %s}',
        b'{"prompt": "x", "temperature": %s}',
        b'{"prompt": "x", "tools": [%s]}',
        b'{"prompt": "x", %s: 1}',
        b'{"messages": [{"role": "user", "content": "x", "tool_calls": [%s]}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}',
    ]
    return random.choice(templates) % random.choice(hostile)


def large(random: random.Random) -> bytes:
    bodies: list[Callable[[], bytes]] = [
        lambda: json.dumps({"prompt": "1" * 7_000_000}).encode(),
        lambda: b'{"prompt": "x", "allowed_token_ids": [' + b"1," * 3_000_000 + b"1]}",
        lambda: b'{"prompt": "x", "metadata": [' + b"[]," * 2_000_000 + b"[]]}",
        lambda: json.dumps({"prompt": "x", "stop": ["a" * 500_000] * 14}).encode(),
        lambda: b'{"prompt": ["x"' + b',"x"' * 1_000_000 + b"]}",
        lambda: b'{"prompt": "x", "logit_bias": {' + b'"1":1,' * 900_000 + b'"1":1}}',
    ]
    return random.choice(bodies)()


def request(random: random.Random) -> Send:
    kind = random.random()
    leaves = random.choice([0.0, 0.001, 0.01, 0.05]) if random.random() < 0.2 else None
    if kind < 0.25:
        return post(CHAT, chat(random)), leaves
    if kind < 0.6:
        return post(COMPLETIONS, options(random)), leaves
    if kind < 0.8:
        return post(random.choice([CHAT, COMPLETIONS]), bytes_of_body(random)), leaves
    if kind < 0.85:  # a head or a body that does not end, from a client that goes
        whole = post(COMPLETIONS, {"prompt": "x"})
        return whole[: random.randrange(len(whole))], 0.01
    if kind < 0.9:
        return post(COMPLETIONS, {"prompt": "x", "max_tokens": 5}, "keep-alive") * 2, leaves
    if kind < 0.95:
        return random.choice([b"\r\n" * 20, b"\x16\x03\x01" * 50, b"GET " + b"/x" * 40_000]) + b"\r\n\r\n", 0.02
    if kind < 0.998:
        return head_of(f"GET {random.choice(['/metrics', '/v1/models', '/nothing', '/v1/../health'])}"), leaves
    return post(COMPLETIONS, large(random), "keep-alive"), leaves


def status_of(port: int, data: bytes, leaves: float | None) -> str:
    """Status of the answer, "" if there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(data)
            if leaves is not None:
                time.sleep(leaves)
                return "left"
            found = b""
            while len(found) < 12 and (piece := connection.recv(4096)):
                found += piece
            if found:  # to the end of a short answer or of a stream; what comes later is of no interest
                connection.settimeout(0.2)
                while connection.recv(1 << 16):
                    pass
        except TimeoutError:
            return found[9:12].decode() if found else "no answer"
        except (ConnectionResetError, BrokenPipeError):
            return "reset"
    return found[9:12].decode()


def resident_and_descriptors(pid: int) -> tuple[float, int]:
    """MB of memory, and open file descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


def test_hostile_requests() -> None:
    with process() as opened:
        port = port_of(opened)
        threading.Thread(target=opened.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        statuses, health = Counter[str](), Counter[str]()
        numbers = iter(range(NUM_REQUESTS))
        lock, done, slowest = threading.Lock(), threading.Event(), 0.0
        measured: list[tuple[float, int]] = []

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if number == int(NUM_REQUESTS * WARM_UP):
                    measured.append(resident_and_descriptors(opened.pid))
                status = status_of(port, *request(random.Random(number)))
                with lock:
                    statuses[status] += 1

        def watch() -> None:
            nonlocal slowest
            while not done.is_set():
                start = time.perf_counter()
                health[status_of(port, HEALTH, None)] += 1
                slowest = max(slowest, time.perf_counter() - start)
                time.sleep(0.05)

        workers = [threading.Thread(target=work) for _ in range(WORKERS)]
        watcher = threading.Thread(target=watch)
        for thread in (*workers, watcher):
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        watcher.join()
        time.sleep(1)
        measured.append(resident_and_descriptors(opened.pid))
        print(f"{dict(statuses)}, slowest /health {slowest:.3f} s, MB and descriptors {measured}")
        assert sum(statuses.values()) == NUM_REQUESTS and statuses["200"] > NUM_REQUESTS / 10
        assert not [status for status in statuses if status.startswith("5") or status == "no answer"]
        assert health.keys() == {"200"} and slowest < MAX_HEALTH_S
        (before, files_before), (after, files_after) = measured
        assert after < before * 1.25 + 50 and files_after <= files_before + 2


TOOL = {"name": "find", "parameters": {"type": "object", "properties": {"place": {"enum": ["here", "there"]}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA | {"additionalProperties": False}}}
# Few enough that sequences are preempted, and that prompts push each other out of the prefix cache.
LITTLE = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 48, "kv_cache_memory": "600k"}


def mixed(random: random.Random) -> tuple[str, Any]:
    """A valid request that has one right answer."""
    length, start = random.randrange(3, 120), random.randrange(3, 9)
    text = "the same beginning, " * start + "x" * length
    messages = [{"role": "user", "content": text[:150]}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": random.randrange(1, 40)}
    sampled = {"temperature": 1.0, "seed": random.randrange(100)}
    prompt = {"prompt": [start] * 20 + [random.randrange(3, 300) for _ in range(length)], "max_tokens": 30}
    kinds: list[tuple[str, Any]] = [
        (CHAT, chat),
        (CHAT, chat | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 60}),
        (CHAT, chat | {"response_format": FORMAT, "max_tokens": 60}),
        (CHAT, chat | sampled | {"stop": ["a", "e", "t"]}),
        (COMPLETIONS, prompt | sampled | {"n": 2, "logprobs": 2}),
        (COMPLETIONS, prompt | {"temperature": 0, "ignore_eos": True, "max_tokens": 90}),
        (COMPLETIONS, prompt | sampled | {"stop": ["q", " "], "echo": True}),
        (COMPLETIONS, prompt | {"structured_outputs": {"regex": "(ab|c){2,9}[0-9]{4}"}, "temperature": 0}),
        ("/v1/responses", {"input": text[:150], "max_output_tokens": 20, "temperature": 0}),
        ("/v1/messages", chat | {"tools": [{"name": "find", "input_schema": TOOL["parameters"]}]}),
    ]
    return random.choice(kinds)


def said(path: str, answer: Answer) -> Any:
    """The content of an answer, without ids and times."""
    assert answer.status == 200, answer.body
    whole = answer.json
    if path == "/v1/responses":
        return whole["status"], [[part["text"] for part in item.get("content", ())] for item in whole["output"]]
    if path == "/v1/messages":
        return whole["stop_reason"], [{**part, "id": None} for part in whole["content"]]
    return [
        _said(choice["finish_reason"], choice.get("text"), [choice.get("message", {})]) for choice in whole["choices"]
    ]


def streamed(answer: Answer) -> Any:
    """The content of a stream of either of OpenAI's older APIs, in the form of `said`."""
    *events, done = answer.events
    assert done == "[DONE]", answer.body
    texts, messages, reasons = dict[int, str](), dict[int, list[Any]](), dict[int, str]()
    for event in events:
        for choice in event["choices"]:
            place = choice["index"]
            texts[place] = texts.get(place, "") + choice.get("text", "")
            messages.setdefault(place, []).append(choice.get("delta", {}))
            reasons[place] = choice["finish_reason"]
    is_chat = "chat" in events[0]["object"]
    return [_said(reasons[place], None if is_chat else texts[place], messages[place]) for place in sorted(reasons)]


def _said(reason: str, text: str | None, messages: list[Any]) -> Any:
    """The content of a message, or of the deltas of one."""
    content = "".join(message.get("content") or "" for message in messages)
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    names = [call["name"] for call in calls if call.get("name")]
    return reason, text, content, names, "".join(call.get("arguments") or "" for call in calls)


def leave(server: Running, path: str, body: Any, random: random.Random) -> None:
    """Ask, read a little of a stream or nothing, and go."""
    with server.connect() as connection:
        server.send(connection, path, {**body, "stream": random.random() < 0.7})
        if random.random() < 0.7:
            connection.settimeout(random.choice([0.001, 0.02, 0.1]))
            with suppress(TimeoutError, ConnectionResetError):
                connection.recv(random.choice([1, 300, 3000]))


def named_threads() -> list[str]:
    """Names of this process's threads, without those of pools, which grow to their size."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if not name.startswith(("asyncio_", "tokenizer_")))


def test_mixed_requests_with_few_blocks() -> None:
    with running(kind="calls tools", limits=LITTLE) as server:
        scheduler = server.llm._core._scheduler  # type: ignore[union-attr]
        bodies = [mixed(random.Random(number)) for number in range(120)]
        expected = [said(path, server.post(path, body)) for path, body in bodies]  # each of them alone
        numbers, lock = iter(range(NUM_MIXED)), threading.Lock()
        done, wrong, measured = Counter[str](), list[Any](), list[tuple[float, int]]()
        wait_until(server.is_idle)
        free = scheduler.num_free_blocks
        tasks, threads = server.call(lambda: len(asyncio.all_tasks())), named_threads()

        def one(number: int) -> None:
            draw = random.Random(-1 - number)
            place, kind = draw.randrange(len(bodies)), draw.random()
            path, body = bodies[place]
            if kind < 0.2:
                leave(server, path, body, draw)
                done["left"] += 1
            elif kind < 0.3:
                status = status_of(server.port, post(draw.choice([CHAT, COMPLETIONS, path]), bytes_of_body(draw)), None)
                done[status] += 1
            else:
                streams = kind < 0.6 and path in (CHAT, COMPLETIONS)
                answer = server.post(path, {**body, "stream": True} if streams else body)
                found = streamed(answer) if streams else said(path, answer)
                done["right" if found == expected[place] else "wrong"] += 1
                if found != expected[place]:
                    wrong.append((path, body, streams, found, expected[place]))

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                if number == int(NUM_MIXED * WARM_UP):
                    measured.append(resident_and_descriptors(os.getpid()))
                try:
                    one(number)
                except Exception as error:
                    wrong.append((number, repr(error)))

        workers = [threading.Thread(target=work) for _ in range(WORKERS)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        wait_until(server.is_idle)
        gc.collect()
        measured.append(resident_and_descriptors(os.getpid()))
        preemptions = server.llm.stats().num_preemptions
        print(f"{dict(done)}, {preemptions} preemptions, MB and descriptors {measured}")
        assert wrong == [] and done["right"] > NUM_MIXED / 2 and preemptions > 0
        assert not [status for status in done if status.startswith("5") or status == "no answer"]
        assert scheduler.num_free_blocks == free
        wait_until(lambda: server.call(lambda: len(asyncio.all_tasks())) <= tasks)
        assert named_threads() == threads
        (before, files_before), (after, files_after) = measured
        assert after < before * 1.1 + 20 and files_after <= files_before + 2
