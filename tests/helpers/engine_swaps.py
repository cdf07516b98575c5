"""Engines that replace each other in a server, and counts of the resources that closed ones leave."""

import gc
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from tests.helpers.process_facts import held, resident_bytes
from tests.helpers.serving import COMPLETIONS, HELLO, Running, wait_until

LONG = {"ignore_eos": True, "max_tokens": 400}


def swap_engines(server: Running, names: Sequence[str], num_swaps: int, max_growth_bytes: int) -> None:
    """Opens engines of which only one fits in turn, without Python's collector of reference cycles.

    Asserts that nothing of an engine is left once the next one is open, and that the process has no more files,
    mappings, threads and children in the last third of the swaps than in the second. asyncio's own threads, which
    are bounded and start when all of them are busy, are not counted.

    Args:
        max_growth_bytes: bytes by which resident memory may grow meanwhile.
    """
    gc.collect()
    gc.disable()
    try:
        parts: list[weakref.ref[Any]] = []
        counts, resident = [], []
        for swap in range(num_swaps):
            name = names[swap % len(names)]
            if swap in (0, 1, num_swaps // 4):
                _ask_in_many_ways(server, name)
            else:
                assert server.chat(model=name, max_tokens=2)["model"] == name
            wait_until(server.is_idle)
            assert not [one() for one in parts if one() is not None], "something of the last engine is left"
            (service,) = server.engines.services
            llm = service.llm
            parts = [
                weakref.ref(part)
                for part in (service, llm, llm.engine, llm.engine.file, llm.engine.tokenizer, llm._core.executor)
            ]
            del service, llm
            counts.append(held(os.getpid()))
            counts[-1]["threads"] -= sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
            resident.append(resident_bytes(os.getpid()))
        third = num_swaps // 3
        for what in counts[0]:
            series = [one[what] for one in counts]
            # Threads and files of a swap may end a moment later, so the last third's least counts; a leak raises it.
            assert min(series[-third:]) <= max(series[third : 2 * third]), (what, series)
        assert resident[-1] - max(resident[third : 2 * third]) <= max_growth_bytes, resident
    finally:
        gc.enable()


def _ask_in_many_ways(server: Running, name: str) -> None:
    """Requests of each kind that keeps references of its own: answered, refused, timed out, and left by the client."""
    some = {"model": name, "max_tokens": 4}
    for stream in False, True:
        server.complete("a", n=2, stop=["zz"], stream=stream, **some)
        server.chat(stream=stream, **some)
        late = server.post(COMPLETIONS, {"prompt": "a", "stream": stream, "timeout": 0.03, **LONG, "model": name})
        assert late.status in (200, 504)
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": "a", "stream": stream, **LONG, "model": name})
    server.complete("a", best_of=3, n=2, **some)
    server.complete("a", use_beam_search=True, n=2, temperature=0, **some)
    assert server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "[ab]{9}"}, **some}).status == 200
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": -5, "model": name}).status == 400
    assert server.post("/v1/responses", {"input": "a", "model": name, "max_output_tokens": 16}).status == 200
    assert server.post("/v1/messages", {"messages": HELLO, **some}).status == 200
