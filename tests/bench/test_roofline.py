"""The roofline: what it measures, and what follows from it. No test here says how fast a machine is."""

import numpy as np
import pytest

from enginewright import _cpu
from enginewright_bench import roofline
from enginewright_bench.roofline import Rate, Roofline, measure_roofline, read_buffer

KNOWN = Roofline("avx512", 1, {"int8": Rate("a", 8e9), "fp32": Rate("b", 2e9)}, 1 << 20, 4e9)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SECONDS", 0.01)


@pytest.mark.parametrize("isa", _cpu.isa_names())
@pytest.mark.parametrize("threads", [1, 2])
def test_every_instruction_set_has_a_roofline(isa: str, threads: int) -> None:
    memory = np.ones(1 << 20, np.uint8)
    found = measure_roofline(isa, threads, [memory, memory[: 1 << 10]])
    assert (found.isa, found.threads, found.read_bytes) == (isa, threads, (1 << 20) + (1 << 10))
    assert "fp32" in found.dots and found.dots.keys() <= {"int8", "bf16", "fp32"}
    assert all(rate.ops_per_s > 0 and rate.instruction for rate in found.dots.values())
    assert found.read_bytes_per_s > 0


def test_dots_that_are_known_are_not_measured_again() -> None:
    assert measure_roofline("portable", 1, [b"x" * 4096], dots=KNOWN.dots).dots is KNOWN.dots


def test_seconds_are_those_of_whatever_takes_longer() -> None:
    assert KNOWN.seconds(4e9, {}) == 1
    assert KNOWN.seconds(4e9, {"int8": 4e9}) == 1
    assert KNOWN.seconds(4e9, {"int8": 8e9, "fp32": 2e9}) == 2
    assert KNOWN.seconds(0, {"bf16": 2e9}) == 1, "what has no instruction of its own is computed in fp32"


def test_the_memory_that_is_read_is_bounded_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_buffer(4096).nbytes == 4096
    monkeypatch.setattr(roofline, "free_memory", lambda: 40_000)
    assert read_buffer().nbytes == 10_000


@pytest.mark.parametrize(
    ("call", "piece"),
    [
        (lambda: _cpu.dot_rates("sse9", 1, 0.01), "no instruction set 'sse9'"),
        (lambda: _cpu.dot_rates("portable", 0, 0.01), "number of threads"),
        (lambda: _cpu.read_rate([b"x" * 64], -1, 0.01), "number of threads"),
        (lambda: _cpu.read_rate([], 1, 0.01), "nothing to read"),
        (lambda: _cpu.read_rate([np.ones((8, 8))[:, ::2]], 1, 0.01), "contiguous"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, piece: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=piece):
        call()
