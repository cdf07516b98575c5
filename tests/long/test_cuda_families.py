"""Engines of the families that other tests do not build, on the emulated GPU, against their graphs and the CPU."""

from pathlib import Path

import pytest

from tests.checkpoint.test_families import ON_GPUS
from tests.cuda.test_engine import check_batch_invariant_answers, check_batch_invariant_logits, check_engine
from tests.helpers.tiny import LATENT
from tests.speculation.test_heads import check_hidden_on_gpus


@pytest.mark.parametrize(
    ("family", "quant", "kv"),
    [
        *((family, quant, "bf16") for family in (*ON_GPUS, *LATENT) for quant in ("bf16", "fp8")),
        *((family, "w8a8", "bf16") for family in ("qwen3", "qwen3_moe", "cohere2")),
        ("gemma3_text", "bf16", "int4"),
        ("gemma3_text", "int4-rtn", "int8"),
        ("llama", "fp8", "bf16"),
        ("qwen2", "int8-wo", "fp8"),
        ("nemotron_h", "bf16", "bf16"),
        *(("kimi_linear", quant, "bf16") for quant in ("bf16", "w8a8")),
    ],
)
def test_an_engine_computes_its_graph(family: str, quant: str, kv: str) -> None:
    check_engine(family, quant, kv)


def test_logits_of_a_batch_invariant_engine() -> None:
    check_batch_invariant_logits("wide", "int4-rtn", others_differ=True)


def test_answers_of_a_batch_invariant_engine_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch_invariant_answers(monkeypatch)


def test_gpus_show_the_hidden_states_that_mtp_layers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hidden_on_gpus("glm4_moe", tmp_path, monkeypatch)


def test_gpus_show_the_hidden_states_that_eagle_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_hidden_on_gpus("eagle llama", tmp_path, monkeypatch)
