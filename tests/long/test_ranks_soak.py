"""2,000 short requests to engines whose ranks are killed at random: no wrong token, and nothing is left."""

import gc
import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineError
from tests.helpers.llm import tokens_of
from tests.helpers.machines import (
    TINY,
    WorkerNode,
    all_ranks,
    group_limits,
    is_rank,
    pids_of_ranks,
    wait_until_none_is_left,
    workers,
)
from tests.helpers.process_facts import held
from tests.helpers.serving import tiny_engine, wait_until

NUM_REQUESTS = 1000  # of each group
BATCH = 20
GROUPS = {"one machine": (1, 3), "two machines": (2, 4)}  # machines, ranks
Requests = list[tuple[list[list[int]], list[SamplingParams]]]  # batches
FACTS = ("files", "children", "mappings")  # of `held`; threads of libraries come and go


def batches(generator: random.Random) -> Requests:
    """All requests: prompts with and without common prefixes, greedy and sampled."""
    prefix = [generator.randrange(3, 300) for _ in range(40)]
    found = []
    for _ in range(NUM_REQUESTS // BATCH):
        prompts, params = [], []
        for _ in range(BATCH):
            own = [generator.randrange(3, 300) for _ in range(generator.choice([1, 2, 7, 33, 70]))]
            prompts.append((prefix if generator.random() < 0.3 else []) + own)
            temperature, seed = generator.choice([0.0, 0.9]), generator.randrange(1000)
            params.append(SamplingParams(max_tokens=6, temperature=temperature, seed=seed, ignore_eos=True))
        found.append((prompts, params))
    return found


def expected_tokens(requests: Requests) -> list[list[list[int]]]:
    with LLM(tiny_engine(), **TINY) as llm:
        return [tokens_of(llm.generate(prompts, params)) for prompts, params in requests]


def kill(generator: random.Random, nodes: list[WorkerNode]) -> None:
    """Kills a random rank."""
    pids = list(pids_of_ranks(nodes).values())
    if pids:
        with suppress(ProcessLookupError):  # the engine has just been closed
            os.kill(generator.choice(pids), signal.SIGKILL)


def answer_some(limits: dict[str, Any], requests: Requests, expected: list[list[list[int]]], todo: list[int]) -> None:
    """Opens an engine, and lets it answer some requests, which are removed from `todo`.

    Raises:
        EngineError: a rank was killed.
    """
    with LLM(tiny_engine(), **limits) as llm:
        for index in todo[:4]:
            tokens = tokens_of(llm.generate(*requests[index]))
            assert tokens == expected[index]
            todo.remove(index)


@pytest.mark.parametrize("group", GROUPS)
def test_ranks_that_are_killed(group: str, tmp_path: Path) -> None:
    generator = random.Random(5)
    requests = batches(generator)
    expected = expected_tokens(requests)
    limits = group_limits(tmp_path, *GROUPS[group])
    before, files = all_ranks(), set(os.listdir("/dev/shm"))
    todo, num_failed = list(range(len(requests))), 0
    facts: list[dict[str, int]] = []
    with workers(tiny_engine(), tmp_path, limits) as nodes:
        while todo:
            # Some are killed at the start, some in a step, some between requests.
            killer = threading.Timer(generator.uniform(0.0, 1.3), kill, (generator, nodes))
            if generator.random() < 0.8:
                killer.start()
            try:
                answer_some(limits, requests, expected, todo)
            except EngineError as error:
                num_failed += 1
                assert "rank" in str(error), error
            killer.cancel()
            if killer.ident is not None:
                killer.join()
            if num_failed == 2 or not todo:
                gc.collect()  # an error refers to the frames that it came through
                for node in nodes:
                    wait_until(lambda node=node: not any(map(is_rank, node.ranks)), 20)  # type: ignore[misc]
                wait_until(lambda: held(os.getpid())["children"] == len(nodes), 20)
                facts.append({name: held(os.getpid())[name] for name in FACTS})
        assert num_failed > 5, "ranks are killed"
        assert facts[-1] == facts[0]
        assert all(node.process.poll() is None for node in nodes)
    wait_until_none_is_left(before)
    assert set(os.listdir("/dev/shm")) <= files
