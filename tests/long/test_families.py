"""Engines of every family and format that tests/checkpoint/test_families.py leaves out, and of awkward sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.passes.quant import W8A8, Bf16, Int4Rtn, QuantConfig
from tests.checkpoint import test_families as short
from tests.checkpoint.test_families import ALONE, CASES, INTEGERS, SOME, check_family
from tests.checkpoint.test_models import content_of_folder
from tests.helpers.breadth import others, repeated
from tests.helpers.tiny import ENCODERS, FAMILIES, HYBRIDS, kind_of, saved, tiny_checkpoint

OTHERS = [*others(CASES, SOME), *((family, INTEGERS[(index + 1) % 2]) for index, family in enumerate(ALONE))]

test_every_op_has_a_kernel_on_gpus = repeated(
    short.test_every_op_has_a_kernel_on_gpus, "family", others(short.OPS_OF, short.SOME_OPS_OF)
)


@pytest.mark.parametrize(("family", "quant"), OTHERS, ids=[f"{family}-{quant.name}" for family, quant in OTHERS])
def test_an_engine_computes_what_transformers_does(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    check_family(family, quant, tmp_path / "tiny.engine")


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *ENCODERS])
def test_what_transformers_loads_and_saves_again_is_the_same_model(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    again = saved(kind_of(family).from_pretrained(folder), tmp_path / "again")
    assert content_of_folder(again, family) == content_of_folder(folder, family)


WIDE_HEADS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 49, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80, "vocab_size": 131},
    "qwen3": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 96, "vocab_size": 257},
    "gpt_oss": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 96, "sliding_window": 5},
    "gemma3_text": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 3},
    "qwen3_moe": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 256, "num_experts": 13},
}


@pytest.mark.parametrize("quant", [Bf16(), W8A8()], ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", WIDE_HEADS)
def test_heads_of_other_sizes(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    check_family(family, quant, tmp_path / "tiny.engine", **WIDE_HEADS[family])


CHOSEN = 3  # the expert that all tokens go to


def to_one_expert(model: PreTrainedModel) -> None:
    """Raises the router's bias of one expert far above all others."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("router.bias", "e_score_correction_bias")):
            with torch.no_grad():
                tensor[..., CHOSEN] = 64.0


@pytest.mark.parametrize("quant", [Bf16(), W8A8(), Int4Rtn()], ids=lambda quant: quant.name)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gpt_oss", {"num_experts_per_tok": 1}),
        ("glm4_moe", {"num_experts_per_tok": 1, "n_group": 4, "topk_group": 1}),
        ("minimax_m2", {"num_experts_per_tok": 1}),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 2, "topk_group": 1}),
        ("ernie4_5_moe", {"moe_k": 1}),
    ],
)
def test_all_rows_go_to_one_expert(family: str, overrides: dict[str, Any], quant: QuantConfig, tmp_path: Path) -> None:
    """One expert gets all rows, and all others get none."""
    check_family(family, quant, tmp_path / "tiny.engine", to_one_expert, **overrides)
