"""EAGLE-3 heads in the layouts in which they are published (tests/speculation/test_heads.py has what all heads do)."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright import LLM, SamplingParams
from enginewright.builder.assembly import Assembly, assemble
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.checkpoint.head import find_head
from enginewright.builder.draft import add_draft, open_draft
from enginewright.builder.heads.base import TargetModel
from enginewright.builder.heads.eagle import build_eagle
from enginewright.builder.pooling import Pooling
from enginewright.builder.progress import Silent
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from enginewright.plan import HIDDEN
from tests import tolerances
from tests.helpers.eagle import EAGLE, WithEagle, with_eagle
from tests.helpers.mixed_requests import LIMITS
from tests.helpers.onnx_run import run
from tests.helpers.tiny import VOCAB_SIZE, MemoryCheckpoint, tiny_config, tiny_model

CONFIG = BuildConfig(gate=None)


def assembled(head: WithEagle, config: BuildConfig = CONFIG) -> Assembly:
    return assemble(head.checkpoint, config, Silent())


def feeds_of(graph: ir.Model, tokens: list[int], **more: Any) -> dict[str, Any]:
    """Inputs of a graph for one text from its first token on."""
    feeds: dict[str, Any] = {"tokens": np.array([tokens]), "positions": np.arange(len(tokens))[None], **more}
    for value in graph.graph.inputs:
        if str(value.name).startswith("past_"):
            shape = [size if isinstance(size, int) else 0 for size in value.shape or ()]
            feeds[str(value.name)] = np.zeros(shape, np.float32)
    return feeds


@pytest.mark.parametrize("case", EAGLE)
def test_graphs_are_what_the_paper_says(case: str, tmp_path: Path) -> None:
    """The model's shown states are right, and so are draft tokens from them and from a state of the head's own."""
    head = with_eagle(case, **EAGLE[case])
    tokens = np.random.default_rng(0).integers(3, 300, 23).tolist()
    target = assembled(head)
    model = TargetModel.of("tiny", head.checkpoint.config, target.dense, target.max_seq_len)
    made, shows = build_eagle(head.draft(tmp_path / "head"), model), target.dense.clone()
    made.reads(shows)
    made.gives(made.graph)
    states = head.states(tokens)
    shown = run(shows, feeds_of(shows, tokens))[HIDDEN][0]
    assert np.abs(shown - states.numpy()).max() < tolerances.HYBRID_LOGITS

    with torch.inference_mode():
        hidden = head.hidden(tokens)[:-2]
        _, own = head.forward(tokens[1:-1], hidden)
        logits, given = head.forward(tokens[1:], torch.cat([hidden, own[-1:]]))
    width = own.shape[1]
    rows = np.zeros((len(tokens) - 1, states.shape[1] + width), np.float32)
    rows[:-1, :-width], rows[-1, -width:] = states[:-2], own[-1]
    said = run(made.graph, feeds_of(made.graph, tokens[1:], hidden_before=rows[None]))
    assert np.abs(said["logits"][0] - logits.numpy()).max() < tolerances.HYBRID_LOGITS
    assert np.abs(said[HIDDEN][0] - given.numpy()).max() < tolerances.HYBRID_LOGITS


@pytest.mark.usefixtures("speculation_pays")
def test_a_head_may_have_fewer_positions(tmp_path: Path) -> None:
    """A head drafts nothing past its last position, whether the prompt or the completion gets longer."""
    head, path = with_eagle("llama", layers=(1, 2)), tmp_path / "short.engine"
    folder = head.store(tmp_path / "head", {"max_position_embeddings": 64}, {})
    build_engine(head.checkpoint, CONFIG, path, draft=open_draft(str(folder)))
    prompts = [np.random.default_rng(1).integers(3, 300, length).tolist() for length in (60, 150, 63, 3)]
    params = [SamplingParams(max_tokens=50, ignore_eos=True, seed=seed) for seed in range(4)]
    tokens, drafted = [], []
    for speculate in "off", "eagle":
        with LLM(path, **{**LIMITS, "max_model_len": 256}, speculate=speculate, speculate_tokens=8) as llm:
            outputs = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
            tokens.append([output.outputs[0].token_ids for output in outputs])
            drafted.append([output.num_draft_tokens for output in outputs])
    assert tokens[0] == tokens[1]
    assert drafted[1][1] == 0 and min(drafted[1][0], drafted[1][3]) > 10


# Keys that published heads have in addition to those of a tiny one.
SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "sliding_window": None,
    "target_model_type": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0",
    "use_cache": True,
    "use_sliding_window": False,
}
SPECULATORS = {
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_attn_kernel": "auto",
    "dtype": "bfloat16",
    "embed_requires_grad": False,
    "fc_norm": False,
    "has_no_defaults_at_init": False,
    "model_type": "speculator_model",
    "speculators_version": "0.3.0",
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
}


@pytest.mark.parametrize(
    ("speculators", "more", "layers"),
    [
        (False, SPECFORGE, (1, 3)),
        (False, {"architectures": ["LlamaForCausalLM"]}, (1, 3)),  # EAGLE's own, known by draft_vocab_size
        (False, {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": None}, (1, 3)),
        (False, {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 3]}, (1, 3)),
        (False, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}}, (1, 2)),
        (True, SPECULATORS, (1, 3)),
        (True, {"architectures": ["Eagle3Speculator"]}, (1, 3)),
    ],
)
def test_published_configs(speculators: bool, more: Mapping[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    head = with_eagle("llama", layers=(1, 3), speculators=speculators)
    target = assembled(head)
    folder = open_draft(str(head.store(tmp_path / "head", more, {})))
    made = build_eagle(folder, TargetModel.of("tiny", head.checkpoint.config, target.dense, target.max_seq_len))
    assert made.reads.layers == layers


@cache
def llama_target() -> Assembly:
    """The model alone, which no head that is refused changes."""
    return assembled(with_eagle("llama", layers=(1, 3)))


D2T = partial(torch.zeros, VOCAB_SIZE, dtype=torch.int64)
NUMBERED = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        (
            {"target_hidden_size": 40},
            {},
            UsageError,
            "head is not a head of tiny: .*40 columns, and the model's have 48",
        ),
        ({"vocab_size": 300}, {}, UsageError, "it has 300 tokens, and the model 307"),
        ({"hidden_size": 40, "target_hidden_size": 48}, {}, UsageError, "no embedding of its own.*48 columns, not 40"),
        ({"eagle_config": {NUMBERED: [0, 3]}}, {}, UsageError, "the states after 1, 4 layers, and the model has 3"),
        ({"eagle_config": {NUMBERED: [-1, 2]}}, {}, UsageError, "the states after 0, 3 layers"),
        ({"eagle_config": {NUMBERED: [1, 1]}}, {}, UsageError, "the states after 2, 2 layers"),
        ({"eagle_config": None}, {}, UsageError, "the states after 2, 1, 0 layers"),  # which vLLM takes
        ({NUMBERED: [1, 2]}, {}, EngineError, r"layer_ids is \[1, 2\], but in eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, UnsupportedModelError, "use_aux_hidden_state = False"),
        ({"eagle_config": {"parallel": True}}, {}, UnsupportedModelError, "parallel = True"),
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            {},
            UnsupportedModelError,
            "'Eagle3DeepseekV2ForCausalLM'",
        ),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {}, UnsupportedModelError, "EagleLlamaForCausalLM.*EAGLE-3"),
        ({"speculators_model_type": "peagle"}, {}, UnsupportedModelError, "speculators_model_type = 'peagle'"),
        ({"model_type": "qwen3"}, {}, UnsupportedModelError, "model_type = 'qwen3'"),
        ({"num_hidden_layers": 2}, {}, UnsupportedModelError, "num_hidden_layers = 2"),
        ({"fc_norm": True}, {}, UnsupportedModelError, "fc_norm = True"),
        ({"logit_scale": 0.5}, {}, UnsupportedModelError, "logit_scale = 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, UnsupportedModelError, "quantization_config"),
        ({"draft_vocab_size": 307}, {"fc.weight": None}, EngineError, r"no tensor fc\.weight"),
        ({}, {"midlayer.hidden_norm.weight": None}, EngineError, r"no tensor midlayer\.hidden_norm\.weight"),
        ({}, {"fc.weight": torch.zeros(48, 144)}, EngineError, r"fc\.weight has the wrong shape.*144\].*\[48, 96\]"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.zeros(3)}, UnsupportedModelError, "1 of .* tensors are not used"),
        ({"draft_vocab_size": 101}, {"lm_head.weight": torch.zeros(101, 48)}, EngineError, "no tensor d2t"),
        ({}, {"d2t": D2T() + 1}, EngineError, "names tokens from 1 to 307, and there are 307"),
        ({}, {"d2t": D2T() - 1}, EngineError, "names tokens from -1 to 305"),
        ({}, {"d2t": D2T().index_fill(0, torch.tensor([4]), 2)}, EngineError, "1 of its 307 tokens are repeated"),
        ({}, {"d2t": D2T().float()}, UnsupportedModelError, "d2t is stored as float32"),
    ],
)
def test_heads_that_do_not_fit(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | None],
    error: type[EngineError],
    message: str,
    tmp_path: Path,
) -> None:
    head = with_eagle("llama", layers=(1, 3))
    draft = find_head(head.store(tmp_path / "head", config, tensors))
    with pytest.raises(error, match=f"(?s){message}"):
        assert draft is not None and add_draft(llama_target(), draft, Silent())


def test_folders_that_are_damaged(tmp_path: Path) -> None:
    head = with_eagle("llama", layers=(1, 3))
    folder = head.store(tmp_path / "head", {}, {})
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match=r"model\.safetensors in .* is cut short"):
        open_draft(str(folder))
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin in .* is a pickle.*\n.*safetensors"):
        open_draft(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json"):
        open_draft(str(folder))


def test_a_head_is_no_model(tmp_path: Path) -> None:
    folder = with_eagle("llama", layers=(1, 3)).store(tmp_path / "head", {}, {})
    with pytest.raises(
        UsageError, match=r"head holds no model: .* proposes draft tokens for one: eagle\n.*with --draft"
    ):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("text", ["~nobody-of-that-name/head", "x" * 5000, "nowhere"])
def test_folders_that_are_not_there(text: str) -> None:
    with pytest.raises(UsageError, match=r"there is no checkpoint|cannot be read"):
        open_draft(text)


def test_models_that_no_head_is_for(tmp_path: Path) -> None:
    draft = with_eagle("llama", layers=(1, 3)).draft(tmp_path / "head")
    config = tiny_config("granite")
    granite = MemoryCheckpoint.of(tiny_model(config), config)
    with pytest.raises(UnsupportedModelError, match=r"divided by its residual_multiplier, 0\.4"):
        add_draft(assemble(granite, CONFIG, Silent()), draft, Silent())
    writes_none = MemoryCheckpoint.of(tiny_model(config := tiny_config("llama")), config)
    writes_none.pooling = Pooling("mean")
    with pytest.raises(UsageError, match="is not a head of tiny: that writes no text"):
        add_draft(assemble(writes_none, CONFIG, Silent()), draft, Silent())
