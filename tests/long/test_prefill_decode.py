"""Prefill and decode apart, with processes of a real model: the same bits as one server, also where one is killed."""

import json
import os
import signal
import time
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
from tests.helpers.run_process import OPTIONS, Process

PROMPT = [1000 + number * 7 % 5000 for number in range(700)]


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
