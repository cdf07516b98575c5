"""Engines of tiny models on the GPU, compared with their graph in onnxruntime and the CPU, alone and in a batch."""

import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx_ir as ir

from benchmarks.gpu import answers
from benchmarks.gpu.answers import AT_ONCE, LIMITS
from benchmarks.gpu.report import Report
from enginewright import LLM, SamplingParams
from enginewright.builder import assembly
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.errors import EngineError
from enginewright.passes.quant import METHODS
from enginewright.plugins.target import CudaTarget, Target
from enginewright.runtime.commands.score import score
from enginewright.runtime.commands.verify import verify
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cuda.device import CudaDevice
from enginewright.runtime.device.devices import open_engine, open_executor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.targets import SMS, choose_code
from tests import tolerances
from tests.helpers.graphs import checkpoint_of, random_tokens, relative_error
from tests.helpers.ragged import RaggedRun
from tests.helpers.tiny import FAMILIES, wide_checkpoint

CALIBRATION = "The quick brown fox jumps over the lazy dog, and what is the capital of France? Paris, it answers.\n" * 8
LENGTHS = (70, 1, 33, 64)
LONGER = (
    150,
    9,
    61,
    36,
)  # texts of batch-invariant engines: their bits are the same however they are cut, and together
CUTS = ((256, 1), (256, 8), (97, 8), (37, 8), (8, 2))  # tokens and sequences of a step
WIDE = "wide llama"
ANSWER = 96  # tokens
ACTIVATIONS = {ir.DataType.BFLOAT16: "bf16", ir.DataType.INT8: "int8", ir.DataType.FLOAT8E4M3FN: "fp8"}
BUILDERS = 6  # processes, each of which has some that compile
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
Array = np.ndarray


@dataclass(frozen=True)
class Case:
    family: str
    quant: str
    kv: str = "bf16"
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        more = (f"/{self.kv} KV" if self.kv != "bf16" else "") + ("/batch-invariant" if self.batch_invariant else "")
        return f"{self.family}/{self.quant}{more}"

    @property
    def tolerance(self) -> float:
        """To its own graph."""
        if self.kv != "bf16":
            return tolerances.ENGINE_GRAPH[f"{self.kv} KV"]
        return tolerances.ENGINE_GRAPH[ACTIVATIONS[quant_config(self.quant).precision(CudaTarget()).dtype]]


def cases() -> list[Case]:
    """The likeliest faults first, as the time may end before they do."""
    plain = [Case(family, "bf16") for family in FAMILIES]
    methods = [method.info.name for method in METHODS if method.info.name != "bf16"]
    pages = [Case(family, "bf16", kv) for family in ("llama", "gemma3_text") for kv in ("int8", "fp8")]
    invariant = [Case(WIDE, quant, batch_invariant=True) for quant in ("bf16", "int4-rtn", "fp8", "int8-wo")]
    return [*plain, *(Case("llama", name) for name in methods), *invariant, *pages, *others(methods)]


def others(methods: list[str]) -> list[Case]:
    return [Case(family, name) for name in methods for family in FAMILIES if family != "llama"]


@dataclass(frozen=True)
class Built:
    """texts: token ids. expected, on_cpu: logits of each, by the GPU's graph in onnxruntime and the CPU's engine."""

    path: Path
    texts: list[list[int]]
    expected: list[Array]
    on_cpu: list[Array]


def build(case: Case, folder: Path, sm: str) -> Built:
    graphs: dict[str, ir.Model] = {}
    lower = assembly.lower

    def watched(model: ir.Model, target: Target, *rest: int):
        graphs[target.name] = model.clone()
        return lower(model, target, *rest)

    path = folder / f"{case.name.replace('/', '-').replace(' ', '-')}.engine"
    data = folder / f"{path.name}.txt"
    data.write_text(CALIBRATION)
    quant = quant_config(case.quant)
    config = BuildConfig(
        quant=quant,
        kv_cache_dtype=case.kv,
        batch_invariant=case.batch_invariant,
        calib_data=str(data) if quant.calibrated else None,
        targets=("cpu", f"cuda:{sm}"),
        gate=None,
    )
    assembly.lower = watched
    try:
        build_engine(wide_checkpoint() if case.family == WIDE else checkpoint_of(case.family), config, path)
    finally:
        assembly.lower = lower
    texts = [random_tokens(length, seed=length).tolist() for length in LENGTHS]
    expected = [RaggedRun(graphs["cuda"], num_blocks=8).step({"text": text})["text"] for text in texts]
    with Engine.open(path, "cpu") as engine:
        on_cpu = score(CpuExecutor(engine, RuntimeConfig(**LIMITS, threads=1)), texts)
    return Built(path, texts, expected, on_cpu)


def scores(engine: Engine, device: str, limits: dict[str, int], runs: list[list[list[int]]]) -> list[Array]:
    """Logits of some texts, one after the other, for each run of them."""
    executor = open_executor(engine, RuntimeConfig(**limits, device=device))
    found = [np.concatenate(score(executor, texts)) for texts in runs]
    executor.close()
    return found


def check(case: Case, built: Built, device: str) -> dict[str, float | str]:
    """Logits on the device; what they may be off by is what an engine on the CPU may."""
    with open_engine(built.path, device) as engine:
        together, alone = scores(engine, device, LIMITS, [built.texts, built.texts[:1]])
        (at_once,) = scores(engine, device, AT_ONCE, [built.texts])
    expected = np.concatenate(built.expected)
    found: dict[str, float | str] = {
        "from its graph": relative_error(together, expected),
        "at once": relative_error(at_once, expected),
        "allowed": case.tolerance,
        "from the CPU": relative_error(together, np.concatenate(built.on_cpu)),
        "alone": relative_error(alone, together[: len(alone)]),
    }
    worst = max(float(found[name]) for name in ("from its graph", "at once", "alone"))
    if not worst < case.tolerance:
        found["error"] = f"its logits are off by {worst:.2g}, allowed is {case.tolerance}"
    return found


def greedy(path: Path, device: str, prompts: list[list[int]], **limits: object) -> tuple[list[list[int]], int, int]:
    """Answers; and how many preemptions there were, and how many tokens of prompts were found computed."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    with LLM(path, device=device, **LIMITS | limits) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats()
    return [one.outputs[0].token_ids for one in outputs], stats.num_preemptions, stats.cached_prompt_tokens


def margin(path: Path, prompt: list[int], answer: list[int], other: int) -> float:
    """Margin of the CPU's next token after an answer over another token."""
    with Engine.open(path, "cpu") as engine:
        (logits,) = score(CpuExecutor(engine, RuntimeConfig(**LIMITS)), [[*prompt, *answer]], last_only=True)
    return float(logits[-1].max() - logits[-1][other])


def in_flight(path: Path, device: str) -> dict[str, float | str]:
    """Requests that share prefixes, in memory for a few of them, compared with the same alone, and on the CPU."""
    random = np.random.default_rng(1)
    begin = random.integers(3, 300, 32).tolist()
    prompts = [begin + random.integers(3, 300, int(count)).tolist() for count in random.integers(1, 20, 16)]
    with Engine.open(path, "cpu") as engine:
        memory = sequence_bytes(engine.plan.caches, LIMITS["max_model_len"], LIMITS["max_num_batched_tokens"])
    together, preemptions, shared = greedy(path, device, prompts, kv_cache_memory=2 * memory)
    alone = [greedy(path, device, [prompt])[0][0] for prompt in prompts[:4]]
    on_cpu, _, _ = greedy(path, "cpu", prompts)
    wrong = []
    for prompt, ours, theirs in zip(prompts, together, on_cpu, strict=True):
        at = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None and (lead := margin(path, prompt, theirs[:at], ours[at])) > tolerances.CLEAR_MARGIN:
            wrong.append(f"token {at} is not the CPU's, which leads by {lead:.2f}")
    found: dict[str, float | str] = {
        "requests": len(prompts),
        "as on the CPU": sum(a == b for a, b in zip(together, on_cpu, strict=True)),
        "as alone, of 4": sum(a == b for a, b in zip(together, alone, strict=False)),
        "preemptions": preemptions,
        "tokens found computed": shared,
    }
    if not preemptions or not shared:
        wrong.append("memory was not short, or nothing was shared")
    return found | ({"error": wrong[0]} if wrong else {})


def in_company(path: Path, device: str) -> dict[str, float | str]:
    """Bits of a batch-invariant engine's logits, in steps of all sizes."""
    texts = [random_tokens(length, seed=length).tolist() for length in LONGER]
    runs = []
    with open_engine(path, device) as engine:
        for tokens, sequences in CUTS:
            limits = LIMITS | {"max_num_batched_tokens": tokens, "max_logit_rows": tokens, "max_num_seqs": sequences}
            runs += scores(engine, device, limits, [texts])
    others = [int((run.view(np.uint32) != runs[0].view(np.uint32)).any(axis=1).sum()) for run in runs[1:]]
    found: dict[str, float | str] = {"positions": len(runs[0]), "of other bits": max(others)}
    if any(others):
        wrong = [f"{count} in steps of {cut[0]}" for cut, count in zip(CUTS[1:], others, strict=True) if count]
        found["error"] = f"of {len(runs[0])} positions, some have other bits than alone: {', '.join(wrong)}"
    return found


def smollm2(report: Report, source: Path, folder: Path, sm: str) -> None:
    for quant in ("bf16", "int4-rtn"):
        path = folder / f"smollm2-{quant}.engine"
        config = BuildConfig(quant=quant_config(quant), targets=("cpu", f"cuda:{sm}"), gate=None)
        build_engine(open_checkpoint(str(source)), config, path)
        texts = {}
        for device in ("cpu", "cuda"):
            with LLM(path, device=device, max_model_len=256) as llm:
                (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40))
                texts[device] = answer.outputs[0].text
        wrong = {} if texts["cpu"] == texts["cuda"] or quant != "bf16" else {"error": "the CPU says something else"}
        report.add(f"engines/smollm2/{quant}", **texts, **wrong)


def run(report: Report) -> None:
    sm = choose_code(CudaDevice().capability, SMS)
    with tempfile.TemporaryDirectory(prefix="enginewright-gpu-") as folder:
        tiny(report, Path(folder), sm)
        source = Path(report.settings["smollm2"])
        if not source.exists():
            report.skip("engines/smollm2", f"there is no {source.name} here (--smollm2)")
            return
        try:
            smollm2(report, source, Path(folder), sm)
        except EngineError as problem:
            report.add("engines/smollm2", error=str(problem)[:300])


def tiny(report: Report, folder: Path, sm: str) -> None:
    with ProcessPoolExecutor(BUILDERS, get_context("spawn")) as pool:
        building = {pool.submit(build, case, folder, sm): case for case in cases()}
        for work in as_completed(building):
            case = building[work]
            with report.case(f"engines/{case.name}"):
                built = work.result()
                report.add(f"engines/{case.name}", **check(case, built, "cuda"))
                if case in (Case("llama", "bf16"), Case("gemma3_text", "bf16")):
                    report.add(f"engines/{case.name}/in flight", **in_flight(built.path, "cuda"))
                    found = verify(built.path, goldens=True, device="cuda")
                    report.add(f"engines/{case.name}/verify", goldens=found["goldens"], deviation=found["deviation"])
                    answers.measure(report, f"engines/{case.name}", built.path, "cuda")
                if case.batch_invariant:
                    report.add(f"engines/{case.name}/in company", **in_company(built.path, "cuda"))
                if case == Case(WIDE, "bf16", batch_invariant=True):
                    answers.measure(report, f"engines/{case.name}", built.path, "cuda", AT_ONCE)
