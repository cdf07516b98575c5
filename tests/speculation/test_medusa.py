"""Medusa heads as they are published and as vLLM stores them; test_heads.py tests what all heads do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginewright import LLM, SamplingParams
from enginewright.builder import build
from enginewright.builder.assembly import Assembly, assemble
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint.head import find_head
from enginewright.builder.draft import add_draft, open_draft
from enginewright.builder.heads.base import TargetModel
from enginewright.builder.heads.medusa import build_medusa
from enginewright.builder.progress import Silent
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from enginewright.plan import HIDDEN_BEFORE
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation.speculator import Proposals, Speculator
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import ScheduledTokens
from tests import tolerances
from tests.emulator.device import device_for
from tests.helpers.graphs import relative_error
from tests.helpers.medusa import MEDUSA, WithMedusa, with_medusa
from tests.helpers.mixed_requests import LIMITS
from tests.helpers.onnx_run import run
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

CONFIG = BuildConfig(gate=None)


def assembled(head: WithMedusa, config: BuildConfig = CONFIG) -> Assembly:
    return assemble(head.checkpoint, config, Silent())


@cache
def llama_target() -> Assembly:
    """The model alone, which no head that is refused changes."""
    return assembled(with_medusa("llama"))


SOME = ["llama-vllm", "qwen3_5_text"]  # tests/long has the others


@pytest.mark.parametrize("case", MEDUSA)
def test_graphs_are_what_the_paper_says(case: str, tmp_path: Path) -> None:
    """Rows of all heads in one step, in no order."""
    head, random = with_medusa(case, **MEDUSA[case]), np.random.default_rng(0)
    target = assembled(head)
    model = TargetModel.of("tiny", head.checkpoint.config, target.dense, target.max_seq_len)
    made = build_medusa(head.draft(tmp_path / "head"), model)
    states = head.hidden(random.integers(3, 300, 23).tolist())
    numbers = random.integers(0, head.heads, 23)
    given = np.concatenate([np.eye(head.heads, dtype=np.float32)[numbers], states.numpy()], 1)
    nothing = np.zeros((1, 23), np.int64)  # heads see no tokens
    feeds = {"tokens": nothing, "positions": nothing, HIDDEN_BEFORE: given[None]}
    said = run(made.graph, feeds)["logits"][0]
    wanted = torch.stack([head.logits(state, number) for state, number in zip(states, numbers, strict=True)])
    assert np.abs(said - wanted.numpy()).max() < tolerances.HYBRID_LOGITS


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("case", SOME)
def test_engines_draft_what_heads_would(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head drafts one token, after prompts that are read at once and in chunks, and after a prefix from the cache;
    never are there more draft tokens than heads.
    """
    made: list[tuple[list[int], Sequence[int]]] = []
    draft = Speculator.propose

    def watched(speculator: Speculator, sequences: Sequence[TokenSequence], num_soon: int) -> Proposals:
        draft_tokens = draft(speculator, sequences, num_soon)
        made.extend((list(one.token_ids), own) for one, own in draft_tokens)
        return draft_tokens

    monkeypatch.setattr(Speculator, "propose", watched)
    head, path, random = with_medusa(case, **MEDUSA[case]), tmp_path / "x.engine", np.random.default_rng(1)
    build_engine(head.checkpoint, CONFIG, path, draft=head.draft(tmp_path / "head"))
    prompts = [random.integers(3, 300, length).tolist() for length in (1, 2, 31, 150, 90)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(path, **{**LIMITS, "max_model_len": 200}, speculate="medusa", speculate_tokens=4) as llm:
        llm.generate(prompts, params)
        (again,) = llm.generate([[*prompts[3], 7, 9, 11]], params)
    assert again.num_cached_tokens == 128
    assert max(len(draft_tokens) for _, draft_tokens in made) == min(head.heads, 4)
    short = [by for tokens, draft_tokens in made for by in head.shortfalls(tokens, draft_tokens)]
    assert len(short) > 50 and max(short) < tolerances.DRAFT_LOGITS


def test_gpus_run_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated GPU agrees with the CPU: for one state, each head gives a row of logits."""
    kernels: dict[str, Specialization] = {}
    monkeypatch.setattr(build, "code_sections", lambda own, targets: kernels.update(own) or {})
    path, config = tmp_path / "gpu.engine", replace(CONFIG, targets=("cpu", "cuda:sm_80"))
    head = with_medusa("llama")
    build_engine(head.checkpoint, config, path, draft=head.draft(tmp_path / "head"))
    limits, said = RuntimeConfig(max_num_seqs=1, max_num_batched_tokens=16, max_logit_rows=16, threads=1), []
    state = head.hidden([3, 4, 5])[-1]
    given = np.concatenate([np.eye(3, dtype=np.float32), np.tile(state, (3, 1))], 1)
    for target in "cpu", "cuda":
        with Engine.open(path, target) as opened:
            engine = opened.for_role("medusa")
            on_cpu = target == "cpu"
            executor = CpuExecutor(engine, limits) if on_cpu else CudaExecutor(engine, device_for(kernels), limits)
            sequence = TokenSequence([0] * 3, 3, 3)
            packer = Packer((), executor.memory_plan.limits)
            packer.place(sequence)
            whole = ScheduledTokens(sequence, 0, 3, 3)
            sizes, arrays = packer.pack([whole], 0, [whole])
            inputs = StepInputs(sizes, arrays, (), (), given)
            said.append(np.array(executor.run(inputs).logits))
    wanted = torch.stack([head.logits(state, number) for number in range(3)]).numpy()
    for logits in said:
        assert relative_error(logits, wanted) < tolerances.ENGINE_GRAPH["bf16"]


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"hidden_size": 40}, {}, UsageError, "head is not a head of tiny: .*40 columns, and the model's have 48"),
        ({"vocab_size": 300}, {}, UsageError, "they have 300 tokens, and the model 307"),
        ({"truncated_vocab_size": 100}, {}, UnsupportedModelError, "truncated_vocab_size = 100"),
        ({"original_lm_head": True}, {}, UnsupportedModelError, "original_lm_head = True"),
        ({"logit_scale": 2.0}, {}, UnsupportedModelError, "logit_scale = 2.0"),
        ({"medusa_num_heads": 0}, {}, EngineError, "medusa_num_heads is 0"),
        ({"medusa_num_heads": 4}, {}, EngineError, r"no tensor 3\.0\.linear\.weight"),
        ({"medusa_num_heads": 2}, {}, UnsupportedModelError, r"3 of the checkpoint's 9 tensors are not used.*2\.0"),
        ({"medusa_num_layers": 2}, {}, EngineError, r"no tensor 0\.1\.linear\.weight"),
        ({}, {"1.0.linear.bias": None}, EngineError, r"no tensor 1\.0\.linear\.bias"),
        ({}, {"0.0.linear.weight": torch.zeros(48, 40)}, EngineError, r"wrong shape.*\[48, 40\].*\[48, 48\]"),
        ({}, {"2.1.weight": torch.zeros(306, 48)}, EngineError, r"wrong shape.*\[306, 48\].*\[307, 48\]"),
    ],
)
def test_heads_that_do_not_fit(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | None],
    error: type[EngineError],
    message: str,
    tmp_path: Path,
) -> None:
    head = with_medusa("llama")
    draft = find_head(head.store(tmp_path / "head", config, tensors))
    with pytest.raises(error, match=f"(?s){message}"):
        assert draft is not None and add_draft(llama_target(), draft, Silent())


def test_folders_that_are_refused(tmp_path: Path) -> None:
    head = with_medusa("llama")
    folder = head.store(tmp_path / "head", {"draft_vocab_size": 307}, {})
    with pytest.raises(UnsupportedModelError, match="has signs of several kinds of heads: eagle and medusa"):
        open_draft(str(folder))
    folder = head.store(tmp_path / "other", {}, {})
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModelError, match=r"medusa_lm_head\.pt in .* is a pickle"):
        open_draft(str(folder))


def test_models_that_no_head_is_for(tmp_path: Path) -> None:
    draft, config = with_medusa("llama").draft(tmp_path / "head"), tiny_config("cohere2")
    scaled = MemoryCheckpoint.of(tiny_model(config), config)
    with pytest.raises(UnsupportedModelError, match="after its last norm: models of type cohere2"):
        add_draft(assemble(scaled, CONFIG, Silent()), draft, Silent())
