"""Three engines of a real model in one server, of which one or two fit into memory."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import quant_config
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.count import format_bytes
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.engine_swaps import swap_engines
from tests.helpers.serving import LIMITS, running

QUANTS = ("int8-wo", "w8a8", "int4-rtn")
SMALL = {"max_model_len": 512, "kv_cache_memory": 32 << 20}
# Between two openings five rows of requests are answered at most: then all streams wait for the engine that is closed.
# So 18 rows take six openings, however fast the machine is.
NUM_REQUESTS = 288
STREAMS = 32
IN_A_ROW = 16  # requests to one engine


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of each method."""
    place = tmp_path_factory.mktemp("engines")
    for quant in QUANTS:
        config = BuildConfig(quant=quant_config(quant), gate=None)
        build_engine(open_checkpoint(str(smollm2_gguf)), config, place / f"{quant}.engine")
    return place


@pytest.mark.parametrize("mmap", [True, False])
def test_closed_engines_are_freed_at_once(folder: Path, mmap: bool) -> None:
    """50 swaps of engines of 100 MiB and more: as much memory at their end as after a third of them."""
    with running(engine=sorted(folder.glob("*.engine")), limits={**SMALL, "mmap": mmap}, memory=200 << 20) as server:
        swap_engines(server, QUANTS, num_swaps=50, max_growth_bytes=40 << 20)


def test_streams_while_engines_are_swapped(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """No error, and each answer as it is given alone. What openings take is printed."""
    caplog.set_level(logging.INFO, logger="enginewright")
    prompts = [f"Question {number}: what is {number} plus {number % 7}? Answer:" for number in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone, nbytes = {}, []
    for quant in QUANTS:
        with LLM(folder / f"{quant}.engine", **LIMITS | SMALL) as llm:
            alone[quant] = [output.outputs[0].text for output in llm.generate(prompts, params)]
            nbytes.append(llm.engine.weight_bytes + llm.memory_plan.arena_bytes + llm.memory_plan.kv_bytes)
    memory = sum(nbytes) - 1
    assert memory >= sum(sorted(nbytes)[1:]), "any two fit"

    def stream(number: int) -> str:
        model = QUANTS[number // IN_A_ROW % 3]
        asked = {"model": model, "max_tokens": 8, "temperature": 0, "stream": True}
        *events, end = server.complete(prompts[number], **asked)
        assert end == "[DONE]"
        return "".join(event["choices"][0]["text"] for event in events)

    with (
        running(engine=sorted(folder.glob("*.engine")), limits=SMALL, memory=memory) as server,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        texts = list(pool.map(stream, range(NUM_REQUESTS)))
    assert texts == [alone[QUANTS[number // IN_A_ROW % 3]][number] for number in range(NUM_REQUESTS)]
    found = [re.search(r" is open after ([\d.]+) s", line) for line in caplog.messages]
    times = [float(one[1]) for one in found if one is not None]
    assert len(times) >= 6, "they were swapped"
    middle, p95 = median(times), quantiles(times, n=20, method="inclusive")[-1]
    with capsys.disabled():
        print(f"\n{len(times)} openings in {format_bytes(memory)}: median {middle:.3f} s, p95 {p95:.3f} s")
