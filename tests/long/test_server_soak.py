"""25,000 requests of which most are hostile, with disconnects, against one server in a process of its own."""

import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, head_of, port_of, process

NUM_REQUESTS = 25_000
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
