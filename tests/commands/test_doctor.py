"""`engine doctor`: what it says of this machine and of others, and of an engine on it."""

import json
from pathlib import Path
from typing import Any

import pytest

from enginewright import _cpu
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.commands.doctor import describe, examine
from enginewright.runtime.device.memory_plan import KvBlocks
from tests.cpu.test_machine import GIB, machine
from tests.helpers.command import run_engine
from tests.helpers.serving import tiny_engine

FILES = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: A Fast CPU @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: Another\n",
    "proc/self/cgroup": "0::/box\n",
    "sys/fs/cgroup/box/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/box/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/box/cpu.max": "100000 100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    **{
        f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}": text
        for cpu in range(256)
        for index, texts in enumerate((("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "2048K")))
        for name, text in zip(("level", "type", "size"), texts, strict=True)
    },
}


def test_a_machine_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    report = examine(None, runtime_config(), machine(tmp_path, FILES))
    assert report["cpu"]["name"] == "A Fast CPU @ 3 GHz" and report["cpu"]["isas"] == _cpu.isa_names()
    assert report["cpu"]["caches"] == {"L1d": 32 << 10, "L1i": 64 << 10, "L2": 2 << 20}
    assert report["cpu"]["control_group_cores"] == report["cpu"]["cores"] == 1
    memory = report["memory"]
    assert (memory["total_bytes"], memory["free_bytes"], memory["control_group_bytes"]) == (16 * GIB, 3 * GIB, 4 * GIB)
    told = " ".join(report["warnings"])
    assert "time for 1 of 2 CPUs" in told and "transparent huge pages are off" in told
    assert report["problems"] == [] and "caches: L1d 32.0 KiB" in describe(report)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    report = examine(None, runtime_config(), tmp_path)
    assert report["cpu"]["name"] is None and report["cpu"]["caches"] == {}
    assert report["memory"]["transparent_huge_pages"] is None
    assert "not known" in describe(report)


def test_what_an_engine_would_do() -> None:
    result = run_engine(
        "doctor", str(tiny_engine()), "--kv-cache-memory", "64m", "--threads", "1", "--isa", "portable", "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    engine: dict[str, Any] = report["engine"]
    assert (engine["device"], engine["isa"], engine["threads"]) == ("cpu", "portable", 1)
    assert 0 < engine["kv_cache_bytes"] <= 64 << 20 and engine["max_model_len"] == 4096
    assert engine["kv_cache_tokens"] >= engine["whole_sequences"] * 4096 > 0
    assert report["problems"] == [] and any("portable" in text for text in report["warnings"])
    text = run_engine("doctor", str(tiny_engine()), "--kv-cache-memory", "64m").stdout
    assert "KV cache" in text and f"holds {engine['kv_cache_tokens']:,} tokens" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--kv-cache-memory", "1k"], "the KV cache of one sequence of 4096 positions takes"),
        (["--device", "cuda:7"], "has no code for cuda"),
        (["--isa", "neon"], "'neon' is no instruction set"),
    ],
)
def test_an_engine_that_cannot_run_here(options: list[str], problem: str) -> None:
    result = run_engine("doctor", str(tiny_engine()), *options)
    assert result.exit_code == 1 and problem in result.stdout
    assert "problem" in result.stdout and "enginewright" in result.stdout, "the machine is described all the same"
    assert not [line for line in result.stdout.splitlines() if line[13:14] != " "], "texts are in their column"


def test_threads_beyond_the_cores() -> None:
    result = run_engine("doctor", str(tiny_engine()), "--threads", "900")
    assert result.exit_code == 0 and "900 threads share" in result.stdout


def test_blocks_that_bound_the_tokens() -> None:
    """Layers with a window need fewer blocks, so they do not bound the tokens."""
    from enginewright.runtime.engine import Engine

    with Engine.open(tiny_engine()) as engine:
        (group,) = engine.plan.paged_caches
        window = type(group)(**{name: getattr(group, name) for name in group.__struct_fields__} | {"window": 64})
    assert KvBlocks.of([window, group], [3, 9]) == KvBlocks(group.block_size, 9)
    assert KvBlocks.of([window], [3]) == KvBlocks(group.block_size, 3)
    assert KvBlocks.of([], []) is None
