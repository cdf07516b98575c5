"""Speedup by a draft model here, in OpenVINO and in llama.cpp: the pair of coder_pair.py, code, greedy, batch 1.

    python benchmarks/speculation_peers.py FOLDER ENGINE [--llama-cpp BIN] [--tokens 96] [--rounds 5] [--threads 2]

FOLDER is that of coder_pair.py. ENGINE is made of it by

    engine build FOLDER/qwen2.5-coder-1.5b.gguf --draft FOLDER/qwen2.5-coder-0.5b.gguf --recipe cpu-w8a8 \\
        --draft-quant int4-rtn --gate off --output ENGINE

Peers have the same: eight bits for the model and four for its draft. OpenVINO's environment and models are made on the
first run, as cpu.py makes them. BIN is the folder of llama.cpp's programs (llama-speculative-simple, llama-bench and
llama-quantize; the source is in the sdist of llama-cpp-python); without it, llama.cpp is left out. Peers are run with
each number of draft tokens of `DRAFT_TOKENS`; ours chooses by itself.

Rounds go through all engines in turn, with the draft and without. A ratio is of one engine, within a round: the time of
all answers, prompts included, without the draft and with it.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from coder_pair import DRAFT, TARGET
from peers.environments import checkpoint_of, openvino_model, python_of
from peers.worker import Worker
from protocol.tasks import CODE

from enginewright import LLM, SamplingParams
from enginewright.runtime.engine import Engine

DRAFT_TOKENS = (3, 5, 8)
# Confidence below which llama.cpp's draft model proposes no further token, in the case that sets this option.
MIN_CONFIDENCE = 0.75

Runs = Mapping[str, Callable[[], float]]  # seconds of all answers by method of speculation; the first is without it


def ours(path: Path, tokens: int, threads: int) -> tuple[Runs, list[list[int]]]:
    """The runs, and the prompts."""
    engine = Engine.open(path)
    limits = {"max_num_seqs": 1, "max_model_len": 1024, "kv_cache_memory": "1g", "threads": threads}
    llms = {way: LLM(engine, **limits, speculate=way) for way in ("off", "draft")}
    prompts = [llms["off"].encode(prompt) for prompt in CODE]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def run(llm: LLM) -> float:
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            llm.generate([prompt], params, cache_salt=f"{began}/{number}")
        return time.perf_counter() - began

    return {way: lambda llm=llm: run(llm) for way, llm in llms.items()}, prompts


def openvino(folder: Path, prompts: list[list[int]], tokens: int, threads: int, workers: ExitStack) -> dict[str, Runs]:
    """Engines by the number of draft tokens, each in a process of its own that ends with `workers`."""
    python = python_of("openvino", folder / "envs")
    models = [
        openvino_model(python, checkpoint_of(folder / parted.name, folder), folder, bits)
        for parted, bits in ((TARGET, "int8"), (DRAFT, "int4"))
    ]
    found = {}
    for draft_tokens in DRAFT_TOKENS:
        script = Path(__file__).parent / "peers/openvino_speculating.py"
        command = [str(python), str(script), *map(str, models), str(draft_tokens), str(threads)]
        worker = workers.enter_context(closing(Worker(command, folder / f"openvino-{draft_tokens}.log")))
        found[f"OpenVINO, {draft_tokens} draft tokens"] = {
            do: lambda worker=worker, do=do: worker.ask(do, prompts=prompts, tokens=tokens).seconds
            for do in ("generate", "speculate")
        }
    return found


def llama_cpp(folder: Path, bin_folder: Path, prompts: list[list[int]], tokens: int, threads: int) -> dict[str, Runs]:
    """Each run is a process, whose loading does not count. Without a draft it is llama-bench: as many tokens, of which
    it does not matter what they are.
    """
    model = folder / f"{Path(TARGET.name).stem}-q8_0.gguf"

    def run(program: str, *options: str | Path) -> str:
        done = subprocess.run([bin_folder / program, *options], check=True, capture_output=True, text=True)
        return done.stdout + done.stderr

    if not model.exists():
        run("llama-quantize", "--allow-requantize", folder / TARGET.name, model, "q8_0")
    same = ["-m", model, "-t", str(threads)]

    def plain() -> float:
        lengths = [option for prompt in prompts for option in ("-pg", f"{len(prompt)},{tokens}")]
        said = run("llama-bench", *same, "-p", "0", "-n", "0", *lengths, "-r", "1", "-o", "json")
        return sum(map(float, re.findall(r'"avg_ns": (\d+)', said))) / 1e9

    def speculate(*options: str) -> float:
        options = (
            "-n",
            str(tokens),
            "-c",
            "1024",
            "--temp",
            "0",
            "--ignore-eos",
            "--spec-type",
            "draft-simple",
            *options,
        )
        seconds = []
        for prompt in CODE:
            said = run("llama-speculative-simple", *same, *options, "-md", folder / DRAFT.name, "-p", str(prompt))
            seconds += re.findall(r"(?:en|de)coded +\d+ tokens in +([\d.]+) seconds", said)
        assert len(seconds) == 2 * len(CODE), "it does not say how long it took"
        return sum(map(float, seconds))

    ways = {f"{count} draft tokens": ["--spec-draft-n-max", str(count)] for count in DRAFT_TOKENS}
    ways |= {
        f"8 draft tokens above {MIN_CONFIDENCE}": ["--spec-draft-n-max", "8", "--spec-draft-p-min", str(MIN_CONFIDENCE)]
    }
    return {
        f"llama.cpp, {way}": {"off": plain, "draft": lambda options=options: speculate(*options)}
        for way, options in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    own, prompts = ours(options.engine, options.tokens, options.threads)
    with ExitStack() as workers:
        engines = {"enginewright": own, **openvino(options.folder, prompts, options.tokens, options.threads, workers)}
        if options.llama_cpp is not None:
            engines |= llama_cpp(options.folder, options.llama_cpp, prompts, options.tokens, options.threads)
        seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
        for number in range(1 + options.rounds):
            for name, runs in engines.items():
                without, drafting = runs.values()
                taken = [without(), drafting()] if number % 2 else [drafting(), without()][::-1]
                if number:  # the first round warms up
                    seconds[name].append(taken)
                print(f"round {number}, {name}: {taken[0]:.2f} s, with a draft {taken[1]:.2f} s", file=sys.stderr)
    num_tokens = options.tokens * len(prompts)
    for name, rounds in seconds.items():
        ratios = [off / on for off, on in rounds]
        off, on = (num_tokens / statistics.median(times) for times in zip(*rounds, strict=True))
        print(
            f"{name}: {statistics.median(ratios):.2f} × as fast with a draft ({min(ratios):.2f}–{max(ratios):.2f}), "
            f"{off:.1f} and {on:.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
