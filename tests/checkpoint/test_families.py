"""Engines of every family that other tests do not build: what transformers computes, and the same bits in any batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright import _cpu
from enginewright.builder.assembly import assemble
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.progress import Silent
from enginewright.passes.quant import W8A8, Bf16, Int4Rtn, QuantConfig
from enginewright.runtime.commands.inspect import summarize
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.graphs import relative_error
from tests.helpers.tiny import (
    ALL_EXPERTS,
    FAMILIES,
    LATENT,
    MIXTURES,
    OF_EACH_BLOCK,
    OF_KERNELS,
    MemoryCheckpoint,
    tiny_config,
    tiny_model,
)

ON_GPUS = [family for family in FAMILIES if family not in (*OF_KERNELS, *MIXTURES)]
LENGTHS = (1, 2, 33, 61, 290)  # longer than windows, a KV block, and a split of attention
CUTS = (512, 7)  # tokens a step, at most
INTEGERS: tuple[QuantConfig, ...] = (W8A8(), Int4Rtn())
ALONE = (*ON_GPUS, "deepseek_v3")  # that no other of these families covers
CASES: list[tuple[str, QuantConfig]] = [
    *((family, Bf16()) for family in ALONE),
    *((family, INTEGERS[index % 2]) for index, family in enumerate(ALONE)),  # tests/long has the other one
    *((family, W8A8()) for family in MIXTURES if family not in (*OF_KERNELS, "deepseek_v3")),
]
SOME_KINDS = (
    *("gemma4_text-bf16", "gpt2-bf16", "cohere2-bf16", "deepseek_v3-bf16"),
    *("phi3-w8a8", "phi3-int4-rtn", "olmo3-w8a8", "olmo3-int4-rtn", "starcoder2-w8a8", "starcoder2-int4-rtn"),
    *("glm4_moe_lite-w8a8", "ernie4_5_moe-w8a8"),
)
SOME = [case for case in CASES if f"{case[0]}-{case[1].name}" in SOME_KINDS]  # one of each kind of block


def logits_of(engine: Engine, isa: str, texts: Sequence[Sequence[int]], cut: int) -> list[np.ndarray]:
    """All logits of texts that are one batch, which is cut into steps."""
    threads = 2 if cut == CUTS[0] else 1  # many small steps of two threads take long where others run
    config = RuntimeConfig(
        isa=isa, threads=threads, max_num_batched_tokens=cut, max_num_seqs=len(texts), max_model_len=320
    )
    return score(CpuExecutor(engine, config), [list(text) for text in texts])


@pytest.mark.parametrize(("family", "quant"), SOME, ids=[f"{family}-{quant.name}" for family, quant in SOME])
def test_an_engine_computes_what_transformers_does(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    check_family(family, quant, tmp_path / "tiny.engine")


def check_family(
    family: str,
    quant: QuantConfig,
    path: Path,
    change: Callable[[PreTrainedModel], None] = lambda _: None,
    **overrides: Any,
) -> None:
    """Checks prompts, their chunks in one batch, and that a text alone gives the same bits.

    Args:
        family: the family of a tiny model.
        quant: its quantization.
        path: file of the engine that is built.
        change: changes the model's weights in place.
        overrides: keys of its tiny_config.
    """
    config = tiny_config(family, **{**ALL_EXPERTS.get(family, {}), **overrides})
    model = tiny_model(config)
    change(model)
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(quant=quant, gate=None), path)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, config["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.inference_mode():
        expected = [model(torch.tensor([text])).logits[0].numpy() for text in texts]
    best, *others = _cpu.isa_names()
    isas = [best, *(others[-1:] if isinstance(quant, Bf16) else ())]  # and the portable one
    for isa in isas:
        with Engine.open(path) as engine:
            alone = [logits_of(engine, isa, [text], CUTS[0])[0] for text in texts]
            for cut in CUTS:
                together = logits_of(engine, isa, texts, cut)
                for length, one, other in zip(LENGTHS, alone, together, strict=True):
                    assert np.array_equal(one, other), f"{length} tokens, cut at {cut}, {isa}"
        for rows, reference in zip(alone, expected, strict=True):
            assert relative_error(rows, reference) < tolerances.ENGINE_LOGITS[quant.name]


@pytest.mark.parametrize("family", LATENT)
def test_a_latent_cache_has_one_vector_for_each_token_and_layer(family: str, tmp_path: Path) -> None:
    """Sizes fill whole cache lines here, as published ones do (512 + 64); others are padded to such sizes."""
    config, path = tiny_config(family, qk_rope_head_dim=32), tmp_path / "tiny.engine"
    build_engine(MemoryCheckpoint.of(tiny_model(config), config), BuildConfig(quant=W8A8(), gate=None), path)
    values = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    assert summarize(path, 1 << 30)["memory"]["kv_bytes_per_token"] == 2 * values, "in bfloat16"


OPS_OF = [*ON_GPUS, *LATENT]
SOME_OPS_OF = [family for family in OPS_OF if family in (*OF_EACH_BLOCK, "mistral4", "starcoder2")]


@pytest.mark.parametrize("family", SOME_OPS_OF)
def test_every_op_has_a_kernel_on_gpus(family: str) -> None:
    """tests/long computes with them, in emulation."""
    checkpoint = MemoryCheckpoint.tiny(family)
    made = assemble(checkpoint, BuildConfig(quant=W8A8(), targets=("cuda:sm_80",), gate=None), Silent())
    (plan,) = made.plans.values()
    assert plan.target == "cuda" and all(call.launches for call in plan.calls)
    assert checkpoint.reads == []
