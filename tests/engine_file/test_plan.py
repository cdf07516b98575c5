"""Plans as executors read them: what is damaged, what this release cannot run, and caches that layers share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginewright.errors import CorruptEngineError, NoCodeForMachineError
from enginewright.plan import COMMON_DIMS, CacheOperand, Linear, PagedCache, Plan, RecurrentState, linear, step_sizes
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.dims import StepCounter
from tests.helpers.engines import copied

CONFIG = RuntimeConfig(max_num_seqs=2, max_model_len=64, threads=1)
STATE = {
    "type": "recurrent",
    "layers": [7, 9],
    "tensors": [
        {"name": "conv", "shape": [3, 8], "dtype": "f32"},
        {"name": "state", "shape": [5], "dtype": "f32"},
    ],
    "snapshot_tokens": 512,
}


@pytest.fixture(scope="module")
def text(engine_path: Path) -> bytes:
    with Engine.open(engine_path) as opened:
        return opened.plan.to_json()


def test_sizes_have_names(text: bytes) -> None:
    plan = Plan.from_json(text)
    assert plan.dims == (*COMMON_DIMS, "kv_blocks", "kv_splits") and plan.to_json() == text
    assert linear(2, tokens=3, other=0) == Linear(2, (("tokens", 3),))
    sizes = step_sizes(tokens=5, sequences=2, logit_rows=1, experts=7)
    assert (sizes.tokens, sizes.sequences, sizes.logit_rows, sizes["experts"]) == (5, 2, 1, 7)
    assert linear(1, tokens=2, experts=-1).at(sizes) == 1 + 2 * 5 - 7
    assert linear(1, tokens=2, experts=-1).by_position(sizes.dims) == (1, 2, 0, 0, -1)
    counter = StepCounter(plan.dims, plan.caches)
    for longest in (1, 31, 32, 33, 255, 256, 257):
        assert counter.sizes(4, 3, 2, longest).counts == (4, 3, 2, -(-longest // 32), -(-longest // 256))
        same = [
            length for length in range(longest, 600) if counter.sizes(1, 1, 1, length)["kv_blocks"] == -(-longest // 32)
        ]
        assert counter.unchanged_up_to(longest) == same[-1]


def _use(change: Callable[[dict[str, Any]], None], text: bytes) -> bytes:
    fields = json.loads(text)
    change(fields)
    return json.dumps(fields).encode()


def _set(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("dims do not begin with", _set("dims", to=["tokens", "logit_rows", "sequences", "kv_blocks", "kv_splits"])),
        ("too many", _set("dims", to=[*COMMON_DIMS, "kv_blocks", "kv_splits", "a", "b", "c", "d"])),
        ("one name", _set("dims", to=[*COMMON_DIMS, "kv_blocks", "kv_splits", "kv_splits"])),
        ("unknown dimension", _set("dims", to=[*COMMON_DIMS, "kv_blocks"])),
        ("unknown dimension", _set("buffers", 0, "rows", to={"terms": [["tokens", 1], ["tokens", 1]]})),
        ("out of range", _set("buffers", 0, "rows", to={"terms": [["tokens", -1]]})),
        ("out of range", _set("inputs", 0, "rows", to={"terms": [["tokens", 2**31]]})),
        ("out of range", _set("inputs", 0, "columns", to={"constant": -1})),
        ("has a window below 0", _set("caches", 0, "window", to=-1)),
        ("a cache is empty", _set("caches", 0, "planes", to=[])),
        ("has no size", _set("caches", 0, "planes", 0, "heads", to=0)),
        ("two parts", _set("caches", 0, "planes", 0, "name", to="value")),
        ("no layer's cache", _set("caches", 0, "planes", 0, "name", to="keys")),
        ("no layer's cache", _set("caches", 0, "layers", to=[0, 1])),
        ("two caches", _set("caches", 0, "layers", to=[0, 1, 2, 2])),
        ("no cost", _set("calls", 0, "cost", to={"of_token": -1})),
        ("unknown plan input a, b", _set("given", to={"b": 0, "a": 0})),
        ("cannot be read", _set("caches", 0, "type", to="ring")),
        ("cannot be read", _set("buffers", 0, "rows", to={"tokens": 1})),
    ],
)
def test_damaged_plans_are_refused(message: str, change: Callable[[dict[str, Any]], None], text: bytes) -> None:
    with pytest.raises(CorruptEngineError, match=message):
        Plan.from_json(_use(change, text))


def _open(engine: Path, folder: Path, plan: bytes) -> CpuExecutor:
    return CpuExecutor(Engine.open(copied(engine, folder / "changed.engine", {"plan/cpu": plan})), CONFIG)


def test_a_dim_that_the_runtime_cannot_count_is_refused_by_name(engine_path: Path, text: bytes, tmp_path: Path) -> None:
    plan = text.replace(b'"kv_splits"', b'"expert_rows"')
    assert "expert_rows" in Plan.from_json(plan).dims
    with pytest.raises(NoCodeForMachineError, match=r"'expert_rows'.*knows tokens, .*kv_blocks") as error:
        _open(engine_path, tmp_path, plan)
    assert error.value.exit_code == 6


def test_tensors_lie_side_by_side_in_a_slot(text: bytes) -> None:
    state = Plan.from_json(_use(lambda fields: fields["caches"].append(STATE), text)).caches[-1]
    assert isinstance(state, RecurrentState) and state.bytes_per_sequence == 2 * (3 * 8 + 5) * 4
    starts = [state.offset_bytes(layer, part) for layer in state.layers for part in state.parts]
    assert starts == [0, 96, 116, 212]


def test_planes_lie_side_by_side_in_a_block(text: bytes) -> None:
    (cache,) = Plan.from_json(text).caches
    assert isinstance(cache, PagedCache)
    starts = [cache.offset_bytes(layer, part) for layer in cache.layers for part in cache.parts]
    assert starts == [cache.block_bytes * index // 6 for index in range(6)]


def test_a_layer_may_read_another_layers_cache(engine_path: Path, text: bytes, tmp_path: Path) -> None:
    """The last attention reads the first layer's planes: as if the last layer had written the first one's keys and
    values, too.
    """
    plan = Plan.from_json(text)
    buffers = tuple(msgspec.structs.replace(buffer, slot=index) for index, buffer in enumerate(plan.buffers))
    first, last = min(plan.caches[0].layers), max(plan.caches[0].layers)
    shared, copies = list(plan.calls), list(plan.calls)
    (source,) = (
        call for call in plan.calls if call.operands.get("key") == CacheOperand(first, "key") and "k" in call.operands
    )
    for index, call in enumerate(plan.calls):
        if call.operands.get("key") != CacheOperand(last, "key"):
            continue
        if "k" in call.operands:
            operands = call.operands | {role: source.operands[role] for role in ("k", "v")}
            copies[index] = msgspec.structs.replace(call, operands=operands)
        else:
            operands = call.operands | {part: CacheOperand(first, part) for part in ("key", "value")}
            shared[index] = msgspec.structs.replace(call, operands=operands)
    texts = [[5, 9, 3, 70, 8] * 8, [4] * 33, [7]]
    found = []
    for calls in (plan.calls, shared, copies):
        changed = msgspec.structs.replace(plan, buffers=buffers, calls=tuple(calls))
        found.append(score(_open(engine_path, tmp_path, changed.to_json()), texts))
    for own, one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one - own).max() > 0
