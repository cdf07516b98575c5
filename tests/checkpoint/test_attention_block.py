"""The attention block, with what few families have, against transformers' own layers, and packed by the passes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.glm4.modeling_glm4 import Glm4Attention, Glm4RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from enginewright.builder.models.blocks import Attention, Embedding, GraphWriter, Head, Heads, RmsNorm
from enginewright.builder.models.blocks.rope import Rope, rope_from
from enginewright.builder.tensors import Tensors
from enginewright.builder.weights import Weights
from enginewright.passes.pipeline import run_pipeline
from enginewright.passes.quant import Bf16
from tests import tolerances
from tests.helpers.graphs import DenseRun, random_tokens, relative_error
from tests.helpers.ragged import RaggedRun
from tests.helpers.tiny import MemoryCheckpoint

TOKENS, HIDDEN, VOCAB = 23, 36, 67
HEADS = Heads(6, 2, 20)
NAME = "model.layers.0.self_attn"

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS.count,
    "num_key_value_heads": HEADS.kv_count,
    "head_dim": HEADS.dim,
    "num_hidden_layers": 1,
    "attn_implementation": "eager",
}
# What transformers has, and the same as a block and its rope.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], PretrainedConfig, Attention, Rope]] = {
    "an output gate, and a rope of some columns": (
        Qwen3NextAttention,
        Qwen3NextRotaryEmbedding,
        AutoConfig.for_model("qwen3_next", **SIZES, layer_types=["full_attention"], partial_rotary_factor=0.3),
        Attention(HEADS, gated=True, head_norm=RmsNorm(1e-6, offset=1.0)),
        rope_from(None, 10_000.0, HEADS.dim, 512, 0.3),
    ),
    "sinks": (
        GptOssAttention,
        GptOssRotaryEmbedding,
        AutoConfig.for_model(
            "gpt_oss",
            **SIZES,
            layer_types=["full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 500},
        ),
        Attention(HEADS, bias=True, output_bias=True, sinks=True),
        rope_from(None, 500.0, HEADS.dim, 512),
    ),
    "sinks and a window": (
        GptOssAttention,
        GptOssRotaryEmbedding,
        AutoConfig.for_model(
            "gpt_oss",
            **SIZES,
            layer_types=["sliding_attention"],
            sliding_window=5,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        ),
        Attention(HEADS, bias=True, output_bias=True, sinks=True, window=5),
        rope_from(None, 500.0, HEADS.dim, 512),
    ),
    "interleaved columns": (
        Glm4Attention,
        Glm4RotaryEmbedding,
        AutoConfig.for_model("glm4", **SIZES, partial_rotary_factor=0.6, attention_bias=True),
        Attention(HEADS, bias=True),
        Rope(rope_from(None, 10_000.0, HEADS.dim, 512, 0.6).inv_freq, interleaved=True),
    ),
}


def graph_and_expected(case: str) -> tuple[ir.Model, np.ndarray, np.ndarray]:
    """logits = head(attention(embedding)); of some tokens, what transformers gives."""
    module, rotary, config, block, rope = CASES[case]
    config._attn_implementation = "eager"
    attention, generator = module(config, 0).eval(), torch.Generator().manual_seed(5)
    stored = {}
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            scale = parameter.shape[-1] ** -0.5 * 2 if parameter.dim() > 1 else 1.0
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(torch.bfloat16))
            stored[f"{NAME}.{name}"] = parameter.to(torch.bfloat16)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        scale = HIDDEN**-0.5 if name.startswith("lm_head") else 1.0
        stored[name] = (scale * torch.randn(VOCAB, HIDDEN, generator=generator)).to(torch.bfloat16)
    tokens = random_tokens(TOKENS, seed=1, vocab_size=VOCAB)

    x, positions = stored["model.embed_tokens.weight"].float()[torch.from_numpy(tokens)][None], torch.arange(TOKENS)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (block.window or TOKENS))
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~seen, -torch.inf)[None, None]
    with torch.no_grad():
        tables = rotary(config)(x, positions[None])
        y, _ = attention(x, position_embeddings=tables, attention_mask=mask)
    expected = y[0] @ stored["lm_head.weight"].float().T

    weights = Weights(Tensors(MemoryCheckpoint({}, stored)))
    graph = GraphWriter(weights, 512)
    h = Embedding(VOCAB, HIDDEN).write(graph, "model.embed_tokens")
    h = block.write(graph, h, NAME, 0, rope.write(graph))
    model = graph.finish(Head(VOCAB, tied=False).write(graph, h, "model.embed_tokens"))
    weights.refuse_left_over()
    return model, tokens, expected.numpy()


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_transformers_layer(case: str) -> None:
    model, tokens, expected = graph_and_expected(case)
    dense = DenseRun(model)
    actual = np.concatenate([dense.step(part) for part in np.split(tokens, [9, 22])])
    assert np.abs(actual - expected).max() < tolerances.DENSE_LOGITS


@pytest.mark.parametrize("case", CASES)
def test_a_packed_block_gives_the_same(case: str) -> None:
    """All that multiplies x is one product, and every op has a kernel."""
    model, tokens, expected = graph_and_expected(case)
    finished, results = run_pipeline(model, Bf16())
    assert results["fuse_qkv"].rewrites == results["fuse_rope_kv_write"].rewrites == 1
    assert sum(node.op_type == "GemmBf16" for node in finished.graph) == 3
    ragged = RaggedRun(finished, num_blocks=4)
    parts = [ragged.step({"a": part})["a"] for part in np.split(tokens, [9, 22])]
    assert relative_error(np.concatenate(parts), expected) < tolerances.ENGINE_LOGITS["bf16"]
