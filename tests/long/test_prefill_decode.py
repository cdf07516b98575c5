"""Prefill and decode apart, with processes of a real model: the same bits as one server, also where one is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import quant_config
from enginewright.runtime.engine import Engine
from tests.helpers.serving import wait_until

PROMPT = [1000 + number * 7 % 5000 for number in range(700)]
OPTIONS = {"max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": True}
WANTED = {"do_remote_decode": True}
ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)")


class Process:
    """`engine run` in a process of its own."""

    def __init__(self, engine: Path, log: Path, *options: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "enginewright.cli", "run", str(engine), "--port", "0", "--threads", "1"]
        with log.open("wb") as out:
            self.process = subprocess.Popen([*command, "--kv-cache-memory", "256m", *options], stdout=out, stderr=out)
        wait_until(lambda: ADDRESS.search(log.read_bytes()) is not None)
        found = ADDRESS.search(log.read_bytes())
        assert found is not None
        self.port = int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def complete(self, prompt: list[int], **options: Any) -> Any:
        body = json.dumps({"prompt": prompt, **OPTIONS, **options}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def lease(self, prompt: list[int]) -> Any:
        return self.complete(prompt, max_tokens=1, kv_transfer_params=WANTED)["kv_transfer_params"]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            found = re.search(rf"^enginewright_{name}\S* (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def end(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(60)


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("engine") / "smollm2.engine"
    config = BuildConfig(quant=quant_config("int8-wo"), gate=None)
    build_engine(open_checkpoint(str(smollm2_gguf)), config, file)
    return file


@pytest.fixture(scope="module")
def expected(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The answer of one server."""
    one = Process(engine, tmp_path_factory.mktemp("one") / "log")
    try:
        return one.complete(PROMPT)["choices"]
    finally:
        one.end()


@contextmanager
def pair(engine: Path, folder: Path) -> Iterator[tuple[Process, Process]]:
    """A server that prefills, and one that decodes."""
    secret = folder / "secret"
    secret.write_text("s" * 32)
    processes = [Process(engine, folder / role, "--kv-role", role, "--kv-secret-file", str(secret)) for role in ROLES]
    try:
        yield processes[0], processes[1]
    finally:
        for one in processes:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
                one.end()


ROLES = ("prefill", "decode")


def test_the_same_bits_and_bytes_as_the_plan_says(engine: Path, tmp_path: Path, expected: Any) -> None:
    with Engine.open(engine) as opened:
        (group,) = opened.plan.caches
        per_token = sum(plane.bytes_per_token for plane in group.planes) * len(group.layers)
        num_tokens = (len(PROMPT) - 1) // group.block_size * group.block_size
    with pair(engine, tmp_path) as (prefill, decode):
        assert decode.complete(PROMPT, kv_transfer_params=prefill.lease(PROMPT))["choices"] == expected
        assert decode.metric("kv_transfer_received_bytes_total") == num_tokens * per_token
        assert prefill.metric("kv_transfer_sent_bytes_total") == num_tokens * per_token
        assert decode.metric("kv_transfer_failures_total") == 0


def test_a_prefill_server_is_killed_before_its_blocks_are_fetched(engine: Path, tmp_path: Path, expected: Any) -> None:
    with pair(engine, tmp_path) as (prefill, decode):
        params = prefill.lease(PROMPT)
        prefill.end(signal.SIGKILL)
        assert decode.complete(PROMPT, kv_transfer_params=params)["choices"] == expected
        assert decode.metric("kv_transfer_failures_total") == 1 and "cannot be reached" in decode.log


def test_a_prefill_server_hangs_while_its_blocks_are_fetched(engine: Path, tmp_path: Path, expected: Any) -> None:
    with pair(engine, tmp_path) as (prefill, decode):
        params = prefill.lease(PROMPT)
        os.kill(prefill.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert decode.complete(PROMPT, kv_transfer_params=params)["choices"] == expected
        assert decode.metric("kv_transfer_failures_total") == 1 and time.monotonic() - began < 60
        os.kill(prefill.process.pid, signal.SIGCONT)
        again = decode.complete([*PROMPT, 5], kv_transfer_params=prefill.lease([*PROMPT, 5]))
        assert again["choices"] and decode.metric("kv_transfer_failures_total") == 1


def test_a_decode_server_is_killed_while_it_answers(engine: Path, tmp_path: Path, expected: Any) -> None:
    """The prefill server goes on, and another decode server answers."""
    with pair(engine, tmp_path) as (prefill, decode):
        connection = HTTPConnection("127.0.0.1", decode.port, timeout=60)
        body = {"prompt": PROMPT, **OPTIONS, "max_tokens": 1000, "stream": True}
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "kv_transfer_params": prefill.lease(PROMPT)}),
            {"Content-Type": "application/json"},
        )
        assert connection.getresponse().read1()
        decode.end(signal.SIGKILL)
        connection.close()
        options = ("--kv-role", "decode", "--kv-secret-file", str(tmp_path / "secret"))
        second = Process(engine, tmp_path / "second", *options)
        try:
            assert second.complete(PROMPT, kv_transfer_params=prefill.lease(PROMPT))["choices"] == expected
        finally:
            second.end()


def test_servers_of_other_engines_and_secrets_refuse_each_other(
    engine: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.engine"
    build_engine(open_checkpoint(str(smollm2_gguf)), BuildConfig(quant=quant_config("int4-rtn"), gate=None), other)
    (tmp_path / "secret").write_text("s" * 32)
    prefill = Process(
        engine, tmp_path / "prefill", "--kv-role", "prefill", "--kv-secret-file", str(tmp_path / "secret")
    )
    decode = Process(other, tmp_path / "decode", "--kv-role", "decode", "--kv-secret-file", str(tmp_path / "secret"))
    try:
        assert decode.complete(PROMPT, kv_transfer_params=prefill.lease(PROMPT))["choices"]
        assert "it has another content hash" in decode.log
        assert decode.metric("kv_transfer_failures_total") == 1
    finally:
        prefill.end()
        decode.end()
