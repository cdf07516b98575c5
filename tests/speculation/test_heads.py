"""Heads draft as they were trained to, and no completion depends on them: those that a model's checkpoint carries, and
those that come in one of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced

from enginewright import LLM, SamplingParams
from enginewright.builder import build
from enginewright.builder.assembly import assemble
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.draft import Automatic, add_draft
from enginewright.builder.models import build_mtp_graph
from enginewright.builder.progress import Silent
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.passes.show_hidden import ShowHidden
from enginewright.plan import HIDDEN, HIDDEN_BEFORE, Plan
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.commands.inspect import describe, summarize
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation import speculator
from enginewright.runtime.speculation.head import HeadModel
from enginewright.runtime.speculation.runner import DraftRunner
from enginewright.runtime.speculation.speculator import Proposals, Speculator
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_plan import StepPlan
from tests import tolerances
from tests.emulator.device import device_for
from tests.helpers.eagle import EAGLE, WithEagle, right_eagle, with_eagle
from tests.helpers.engines import folder_of_engines
from tests.helpers.graphs import relative_error
from tests.helpers.heads import MTP, Drafter, right_mtp, with_mtp
from tests.helpers.medusa import MEDUSA, right_medusa, with_medusa
from tests.helpers.mixed_requests import LIMITS, answers, check_draft_tokens, check_same
from tests.helpers.onnx_run import run
from tests.helpers.tiny import ALL_EXPERTS, VOCAB_SIZE, MemoryCheckpoint

CONFIG = BuildConfig(gate=None)


CHAINS = (*MTP, *(f"eagle {case}" for case in EAGLE))  # whose draft tokens depend on earlier ones
HEADS = (*CHAINS, *(f"medusa {case}" for case in MEDUSA))
DRAFTING = [f"all-experts {case}" if case in ALL_EXPERTS else case for case in CHAINS]
# One of each form in which heads come, and of each kind of layer; tests/long has the others.
SOME_DRAFTING = ["all-experts glm4_moe", "qwen3_5_text", "eagle llama-own-embedding"]
SOME_HEADS = ["qwen3_5_text", "eagle llama-normed", "medusa llama"]
QUANTIZED = [
    (case, quant)
    for case in ("untied qwen3_5_text", "eagle llama", "eagle qwen3_5_text", "medusa llama", "medusa llama-vllm")
    for quant in ("w8a8", "int4-rtn", "int8-sq", "auto")
]
SOME_QUANTIZED = QUANTIZED[::5]  # each method, and each kind of head
ANSWERING = [(case, quant) for case in ("eagle llama", "medusa llama") for quant in ("w8a8", "int4-rtn")]
SOME_ANSWERING = ANSWERING[::3]


@cache
def head_of(case: str) -> Drafter:
    """A head by the name of a case. Most models tie their embeddings, and so repeat themselves in greedy decoding."""
    match case.split():
        case ["untied", family]:
            return with_mtp(family)
        case ["all-experts", family]:
            return with_mtp(family, tie_word_embeddings=True, **ALL_EXPERTS[family])
        case ["eagle", own]:
            return with_eagle(own, **EAGLE[own])
        case ["medusa", own]:
            return with_medusa(own, **MEDUSA[own])
    return with_mtp(case, tie_word_embeddings=True)


@cache
def engine_of(case: str) -> Path:
    head, path = head_of(case), folder_of_engines() / f"heads-{case}.engine"
    build_engine(head.checkpoint, CONFIG, path, draft=head.draft(folder_of_engines() / f"heads-{case}"))
    return path


@pytest.mark.parametrize("family", MTP)
def test_mtp_graphs_are_what_transformers_computes(family: str) -> None:
    head = with_mtp(family)
    tokens = np.random.default_rng(0).integers(3, 300, 23).tolist()
    hidden = head.hidden(tokens)
    logits, states = head.forward(tokens[1:], hidden[:-1])
    graph = build_mtp_graph(head.checkpoint)
    assert graph is not None
    ShowHidden()(graph)
    feeds: dict[str, Any] = {
        "tokens": np.array([tokens[1:]]),
        "positions": np.arange(len(tokens) - 1)[None],
        HIDDEN_BEFORE: hidden[None, :-1].numpy(),
    }
    for value in graph.graph.inputs:
        if str(value.name).startswith("past_"):
            shape = [size if isinstance(size, int) else 0 for size in value.shape or ()]
            feeds[str(value.name)] = np.zeros(shape, np.float32)
    given = run(graph, feeds)
    assert np.abs(given["logits"][0] - logits.numpy()).max() < tolerances.HYBRID_LOGITS
    assert np.abs(given[HIDDEN][0] - states.numpy()).max() < tolerances.HYBRID_LOGITS


class Watched:
    """A record of draft tokens by heads: the tokens before, the position that the head begins at, the draft tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[list[int], int, Sequence[int]]] = []
        draft = Speculator.propose

        def watched(drafting: Speculator, sequences: Sequence[TokenSequence], num_soon: int) -> Proposals:
            draft_tokens = draft(drafting, sequences, num_soon)
            for one, own in draft_tokens:
                assert isinstance(drafting.proposer, HeadModel)
                assert drafting.proposer.catch_up_s(one) == 0, "it has read what it drafts after"
                self.made.append((list(one.token_ids), drafting.proposer._hidden[one].first, own))
            return draft_tokens

        monkeypatch.setattr(Speculator, "propose", watched)

    def check(self, head: Drafter) -> int:
        """Checks that all draft tokens are the head's own choice; gives their number."""
        short = [by for tokens, first, draft_tokens in self.made for by in head.shortfalls(tokens, draft_tokens, first)]
        assert max(short) < tolerances.DRAFT_LOGITS
        return len(short)


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("case", SOME_DRAFTING)
def test_engines_draft_what_heads_would(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several draft tokens in a chain are right after prompts that are read at once and in chunks, with wrong ones
    rolled back; and after a prefix from the cache, where the head begins at the first computed position.
    """
    watched = Watched(monkeypatch)
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 300, length).tolist() for length in (2, 3, 31, 150, 90)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    head = head_of(case)
    with LLM(engine_of(case), **{**LIMITS, "max_model_len": 200}, speculate=head.role, speculate_tokens=3) as llm:
        llm.generate(prompts, params)
        assert watched.check(head) > 100 and {first for _, first, _ in watched.made} == {0}
        watched.made.clear()
        (again,) = llm.generate([[*prompts[3], 7, 9, 11]], params)
    assert watched.check(head) > 10
    assert {first for _, first, _ in watched.made} == {again.num_cached_tokens} == {128}


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("case", SOME_HEADS)
def test_no_answer_depends_on_heads(case: str) -> None:
    with Engine.open(engine_of(case)) as engine:
        plain, _ = answers(engine, 40, speculate="off")
        for limits in {}, {"enable_prefix_caching": False, "prefill_chunk_size": 7}:
            drafted, after = answers(engine, 40, speculate=head_of(case).role, speculate_tokens=4, **limits)
            check_same(plain, drafted)
            assert after.speculation is not None and sum(after.speculation.drafted) > 300


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("case", ["glm4_moe", "eagle llama", "medusa llama"])
def test_heads_go_on_after_preemptions(case: str) -> None:
    """Preempted sequences, computed again from where the prefix cache ends, get draft tokens as before."""
    random, path = np.random.default_rng(4), engine_of(case)
    prompts = [random.integers(3, 300, 40).tolist() for _ in range(6)]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in range(6)]
    role, limits = head_of(case).role, (LIMITS["max_model_len"], LIMITS["max_num_batched_tokens"])
    with Engine.open(path) as engine:
        both = sum(sequence_bytes(plan.caches, *limits) for plan in (engine.plan, engine.for_role(role).plan))
    with LLM(path, **LIMITS, speculate="off") as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(path, **LIMITS, speculate=role, speculate_tokens=4, kv_cache_memory=2 * both) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == plain
        stats = llm.stats()
    assert stats.num_preemptions > 1 and stats.speculation is not None and sum(stats.speculation.drafted) > 400


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("right", [right_mtp, right_eagle, right_medusa])
def test_a_head_that_is_right_is_always_right(right: Callable[[], Drafter], tmp_path: Path) -> None:
    """A head with the model's own logits is always accepted: both sample with the noise of each token's position."""
    head, path = right(), tmp_path / "right.engine"
    build_engine(head.checkpoint, CONFIG, path, draft=head.draft(tmp_path / "head"))
    with Engine.open(path) as engine:
        assert check_draft_tokens(engine, 30, 150, speculate=head.role) > 0.97


def test_states_that_no_draft_needs_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where speculation never pays, the head still reads pending states; where it has no memory, it drops them."""
    monkeypatch.setattr(StepCost, "seconds", lambda self, tokens: tokens)
    monkeypatch.setattr(speculator, "PROBING", 0.0)
    counts: list[int] = []
    observe = HeadModel.observe

    def watched(head: HeadModel, plan: Any, outputs: Any) -> None:
        observe(head, plan, outputs)
        counts.append(max((len(states.rows) for states in head._hidden.values()), default=0))

    monkeypatch.setattr(HeadModel, "observe", watched)
    prompts = [np.random.default_rng(1).integers(3, 300, length).tolist() for length in (500, 400, 300)]
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "threads": 1}
    for has_room in True, False:
        counts.clear()
        with LLM(engine_of("glm4_moe"), **limits, speculate="mtp") as llm:
            if not has_room:
                monkeypatch.setattr(DraftRunner, "_open", lambda *_: None)
            llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
            stats = llm.stats().speculation
        assert stats is not None and not stats.num_drafts
        assert 32 <= max(counts) <= 3 * 32


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("case", "shared", "sources"),
    [
        ("untied glm4_moe", {EMBEDDING, "lm_head.weight", "rope.inv_freq"}, set()),
        ("eagle llama", {EMBEDDING}, {"eagle/config.json", "eagle/model.safetensors"}),
        ("eagle llama-own-embedding", set(), {"eagle/config.json", "eagle/model.safetensors"}),
        ("medusa llama", set(), {"medusa/config.json", "medusa/medusa_lm_head.safetensors"}),
    ],
)
def test_an_engine_with_heads_is_the_same_model(case: str, shared: set[str], sources: set[str], tmp_path: Path) -> None:
    """Its logits and completions are those of an engine without heads, and weights that both read are stored once.
    Only a head of the model's own checkpoint drafts tokens by default.
    """
    head, found = head_of(case), []
    role, carried = head.role, head.role == "mtp"
    plain = build_engine(head.checkpoint, CONFIG, tmp_path / "plain.engine")
    both = build_engine(head.checkpoint, CONFIG, tmp_path / "both.engine", draft=head.draft(tmp_path / "head"))
    assert any("multi-token prediction" in note for note in plain.notes) == carried
    assert not any("multi-token prediction" in note for note in both.notes)
    prompts = [np.random.default_rng(2).integers(3, 300, length).tolist() for length in (1, 40)]
    limits = runtime_config(threads=1, max_num_seqs=2, max_num_batched_tokens=19, kv_cache_memory="4m")
    for one in plain, both:
        with Engine.open(one.path, verify=True) as engine:
            found.append((score(CpuExecutor(engine, limits), prompts), *answers(engine, 12)))
    (logits, said, _), (others, again, stats) = found
    for mine, its in zip(logits, others, strict=True):
        assert np.array_equal(mine.view(np.uint32), its.view(np.uint32))
    check_same(said, again)
    assert (stats.speculation is not None) == carried
    with Engine.open(both.path) as engine:
        assert set(engine.plan.weight_names()) & set(engine.for_role(role).plan.weight_names()) == shared
        assert {name for name in engine.manifest.sources if name.startswith(f"{role}/")} == sources
    summary = summarize(both.path)
    description = describe(summary)
    assert (summary["speculate"], list(summary["roles"])) == ("mtp" if carried else None, [role])
    assert summary["recipe"][role] == ({"layers": 1} if carried else {"name": "head"})
    assert (summary["roles"][role]["kv_bytes_per_token"] == 0) == (role == "medusa")
    assert ("speculate  mtp" in description) == carried and f"\n  {role} " in description


@pytest.mark.parametrize(("case", "quant"), SOME_QUANTIZED)
def test_heads_are_quantized_as_the_model_is(case: str, quant: str, tmp_path: Path) -> None:
    """Heads have the model's quantization on all targets, but no static scales, which need calibration texts."""
    settings = {"activation_scheme": "static"} if quant == "int8-sq" else {}
    config = replace(CONFIG, targets=("cpu", "cuda:sm_90a"), quant=quant_config(quant, **settings))
    head = head_of(case)
    both = add_draft(assemble(head.checkpoint, config, Silent()), head.draft(tmp_path / "head"), Silent())
    for platform in "cpu", "cuda":
        own, model = (Plan.from_json(both.files[f"plan/{role}{platform}"]) for role in (f"{head.role}/", ""))
        assert set(model.outputs) == {HIDDEN, "logits"} and set(own.given) == {HIDDEN_BEFORE}
        is_medusa = head.role == "medusa"  # whose heads read one row of the model's, and nothing of their own
        assert set(own.outputs) == ({"logits"} if is_medusa else {HIDDEN, "logits"}) and bool(own.caches) != is_medusa
        assert own.vocab_size == model.vocab_size == VOCAB_SIZE
        assert not any("largest" in call.operands for call in own.calls)
        assert {*own.weight_names(), *model.weight_names()} == set(both.weights) or platform == "cuda"
        assert {call.kernel for call in own.calls if call.kernel.startswith("gemm_")} - {"gemm_bf16@1"}


@pytest.mark.parametrize("case", ["untied qwen3_5_text", "eagle llama", "medusa llama"])
def test_heads_may_have_a_method_of_their_own(case: str, tmp_path: Path) -> None:
    head = head_of(case)
    target = assemble(head.checkpoint, replace(CONFIG, draft_quant=quant_config("int4-rtn")), Silent())
    both = add_draft(target, head.draft(tmp_path / "head"), Silent())
    own, model = (Plan.from_json(both.files[f"plan/{role}cpu"]) for role in (f"{head.role}/", ""))
    products = [{call.kernel for call in plan.calls if call.kernel.startswith("gemm_")} for plan in (own, model)]
    assert any("w4" in kernel for kernel in products[0]) and products[1] == {"gemm_bf16@1"}
    assert both.about({}).recipe[head.role]["quant"] == "int4-rtn"


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize(("case", "quant"), SOME_ANSWERING)
def test_no_answer_depends_on_quantized_heads(case: str, quant: str, tmp_path: Path) -> None:
    head, path = head_of(case), tmp_path / "x.engine"
    build_engine(head.checkpoint, replace(CONFIG, quant=quant_config(quant)), path, draft=head.draft(tmp_path / "head"))
    with Engine.open(path) as engine:
        check_draft_tokens(engine, 12, 100, speculate=head.role)


def test_gpus_show_hidden_states_and_are_given_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hidden_on_gpus("eagle llama-normed", tmp_path, monkeypatch)  # a small one, which reads two layers


def check_hidden_on_gpus(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks an emulated GPU against the CPU: the model's states, and the head's results for them."""
    kernels: dict[str, Specialization] = {}
    monkeypatch.setattr(build, "code_sections", lambda own, targets: kernels.update(own) or {})
    path, config = tmp_path / "gpu.engine", replace(CONFIG, targets=("cpu", "cuda:sm_80"))
    head = head_of(case) if case.startswith("eagle") else with_mtp(case, **ALL_EXPERTS[case])
    build_engine(head.checkpoint, config, path, draft=head.draft(tmp_path / "head"))
    limits = RuntimeConfig(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, max_logit_rows=16, threads=1)
    tokens, hidden = np.random.default_rng(0).integers(3, 300, 12).tolist(), None
    width = head.checkpoint.config["hidden_size"]
    for role in None, head.role:
        shown = []
        for target in "cpu", "cuda":
            with Engine.open(path, target) as opened:
                engine = opened.for_role(role) if role else opened
                on_cpu = target == "cpu"
                executor = CpuExecutor(engine, limits) if on_cpu else CudaExecutor(engine, device_for(kernels), limits)
                sequence = TokenSequence(tokens, len(tokens), len(tokens) + 1)
                if hidden is not None:  # the model's states are the first columns
                    before = engine.plan.buffers[engine.plan.given[HIDDEN_BEFORE]].columns
                    hidden = np.pad(hidden, ((0, 0), (0, before - hidden.shape[1])))
                inputs = replaced(_step(executor, sequence).inputs, hidden=hidden)
                outputs = executor.run(inputs)
                shown.append((np.array(outputs.hidden), np.array(outputs.logits)))
        (hidden, logits), (states, others) = shown
        num_states = len(head.layers) if role is None and isinstance(head, WithEagle) else 1
        assert states.shape == hidden.shape == (12, num_states * width)
        assert relative_error(states, hidden) < tolerances.ENGINE_GRAPH["bf16"]
        assert relative_error(others, logits) < tolerances.ENGINE_GRAPH["bf16"]


def _step(executor: Executor, sequence: TokenSequence) -> StepPlan:
    """Plans a step with a complete prompt."""
    scheduler = Scheduler(executor.plan.caches, executor.memory_plan.limits, executor.memory_plan.num_blocks)
    sequence.state.needs_prompt_logits = True
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None and plan.inputs.sizes.tokens == len(sequence.token_ids)
    return plan


def changed(checkpoint: MemoryCheckpoint, **instead: torch.Tensor | None) -> MemoryCheckpoint:
    """A copy of the checkpoint with other tensors of these names, or without those that are None."""
    stored = {**checkpoint.stored, **instead}
    return replace(checkpoint, stored={name: value for name, value in stored.items() if value is not None})


@pytest.mark.parametrize(
    ("instead", "error", "message"),
    [
        ({"mtp.fc.weight": None}, EngineError, r"the checkpoint has no tensor mtp\.fc\.weight"),
        ({"mtp.layers.0.mlp.up_proj.weight": None}, EngineError, r"no tensor mtp\.layers\.0\.mlp\.up_proj\.weight"),
        ({"mtp.norm.weight": torch.zeros(41)}, EngineError, r"mtp\.norm\.weight has the wrong shape.*\[41\].*\[40\]"),
        ({"mtp.gate.weight": torch.zeros(3)}, UnsupportedModelError, r"1 of .* tensors are not used.*mtp\.gate"),
    ],
)
def test_heads_that_do_not_fit_the_model(
    instead: dict[str, torch.Tensor | None], error: type[EngineError], message: str
) -> None:
    checkpoint = changed(with_mtp("qwen3_5_text").checkpoint, **instead)
    with pytest.raises(error, match=f"(?s){message}"):
        add_draft(assemble(checkpoint, CONFIG, Silent()), Automatic(), Silent())


def test_what_a_checkpoint_has_decides() -> None:
    """A second layer is left out, with a note; without any, prompt lookup drafts; own embeddings are refused."""

    def drafted(checkpoint: MemoryCheckpoint) -> Any:
        return add_draft(assemble(checkpoint, CONFIG, Silent()), Automatic(), Silent())

    checkpoint = with_mtp("qwen3_5_text").checkpoint
    second = drafted(changed(checkpoint, **{"mtp.layers.1.mlp.up_proj.weight": torch.zeros(3)}))
    assert (
        any("1 weights: of a second multi-token prediction layer" in note for note in second.notes)
        and second.speculate == "mtp"
    )
    none = drafted(changed(checkpoint, **{name: None for name in checkpoint.stored if name.startswith("mtp.")}))
    assert none.speculate == "ngram" and not none.roles
    with pytest.raises(UnsupportedModelError, match="mtp_use_dedicated_embeddings"):
        drafted(replace(checkpoint, config={**checkpoint.config, "mtp_use_dedicated_embeddings": True}))
