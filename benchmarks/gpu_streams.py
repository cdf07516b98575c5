"""Number of streams that the server can keep up with, if a step of a GPU takes some milliseconds. Needs no GPU.

    python benchmarks/gpu_streams.py [CHECKPOINT] [--streams 64 128 256] [--step-ms 4 8] [--tokens 1000]

A server in a process of its own serves an engine for GPUs on a device that does nothing but take its time, whose tokens
are always the same; clients in this process ask for a stream each, all at once, and read. A server that keeps up sends
an event for each token; one that does not sends several tokens in one. From the first event to the last answer's end:
tokens per second compared with those of the device, events per token, and the CPU time of the server.
"""

import argparse
import json
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path

from gpu_host import FREE_BYTES, SMOLLM2, IdleDevice

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve
from enginewright_bench.cpu_time import cpu_seconds

START_S = 60.0
POSITIONS = 64  # of a prompt, at most


class PacedDevice(IdleDevice):
    """A device whose graphs take a fixed time each, one after the other. Prompts have no graph, and take none."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s, self._done = step_s, 0.0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            self._done = max(self._done, time.perf_counter()) + self._step_s

        return step

    def event(self) -> list[float]:
        return [0.0]

    def record(self, event: list[float]) -> None:
        event[0] = self._done

    def wait(self, event: list[float]) -> None:
        time.sleep(max(event[0] - time.perf_counter(), 0.0))


@dataclass(frozen=True)
class Load:
    """Streams against a server whose steps are paced."""

    streams: int  # at once
    step_ms: float  # milliseconds of a step
    tokens: int  # of each stream


def serve_paced(path: Path, load: Load, port: int) -> None:
    device = PacedDevice(load.step_ms / 1e3)
    core.open_executor = lambda engine, config: CudaExecutor(engine, device, config)
    with Engine.open(path, "cuda") as engine:
        limits = {"max_num_seqs": load.streams, "max_model_len": load.tokens + POSITIONS}
        serve(engine, ServerConfig(port=port), kv_cache_memory=FREE_BYTES * 3 // 4, **limits)


@contextmanager
def server(path: Path, load: Load) -> Iterator[tuple[int, int]]:
    """Its process, and the port that it listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = get_context("spawn").Process(target=serve_paced, args=(path, load, port))
    process.start()
    try:
        assert process.pid is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if not process.is_alive() or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.join()


def stream(port: int, index: int, tokens: int) -> socket.socket:
    """A request that has been sent."""
    messages = [{"role": "user", "content": f"What is special about {index}?"}]
    body = {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.sock.setblocking(False)
    return connection.sock


def measure(load: Load, pid: int, port: int) -> str:
    connections = {one.fileno(): one for one in (stream(port, n, load.tokens) for n in range(load.streams))}
    poll = select.epoll()
    for number in connections:
        poll.register(number, select.EPOLLIN)
    ends, events, start, cpu = dict.fromkeys(connections, b""), 0, 0.0, 0.0
    while connections:
        for number, _ in poll.poll():
            data = connections[number].recv(1 << 16)
            if not data:
                raise SystemExit(f"the server has closed a stream: {ends[number].decode(errors='replace')}")
            if not events:
                start, cpu = time.perf_counter(), cpu_seconds(pid)
            events += data.count(b"data: ")
            ends[number] = (ends[number] + data)[-100:]
            if b"data: [DONE]" in ends[number]:
                poll.unregister(number)
                connections.pop(number).close()
    taken, cpu = time.perf_counter() - start, cpu_seconds(pid) - cpu
    tokens = load.streams * load.tokens
    return (
        f"{load.streams:>5} streams, {load.step_ms:g} ms per step: {tokens / taken:7.0f} of"
        f" {load.streams / load.step_ms * 1e3:.0f} tokens/s, {events / tokens:.2f} events per token;"
        f" the server: {cpu / taken:.2f} cores, {cpu / tokens * 1e6:.1f} us per token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.0, 8.0])
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config("int4-rtn"), targets=("cuda:sm_80",), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        for step_ms in arguments.step_ms:
            for streams in arguments.streams:
                load = Load(streams, step_ms, arguments.tokens)
                with server(path, load) as (pid, port):
                    print(measure(load, pid, port), flush=True)


if __name__ == "__main__":
    main()
