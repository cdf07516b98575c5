"""A real model's engine beside transformers: the same tokens, and logits no further from fp32 than bf16 is.

The text is what transformers writes greedily in fp32 after 20 prompts; every implementation is then given that
text (teacher forcing), and its next-token distributions at the 64 written positions are compared with fp32's.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from enginewright.passes.quant import Fp8
from enginewright.runtime.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.memory_plan import RuntimeConfig
from enginewright.runtime.score import score
from tests import tolerances
from tests.helpers.engines import built
from tests.helpers.prompts import PROMPTS

NEW_TOKENS = 64
FORMS = {"fp8 block": Fp8(fp8_scales="block")}


class Reference:
    """transformers on the checkpoint: texts as token ids, and logits at the positions that predict new tokens."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.fp32 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            for prompt in PROMPTS
        ]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        longest = max(self.prompt_lengths)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        written = self.fp32.generate(
            padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        self.texts = [prompt + row[longest:].tolist() for prompt, row in zip(prompts, written, strict=True)]
        self.fp32_logits = self.logits(self.fp32)
        bf16 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.bf16_logits = self.logits(bf16)

    @torch.inference_mode()
    def logits(self, model: torch.nn.Module) -> torch.Tensor:
        rows = [model(torch.tensor([text])).logits[0].float() for text in self.texts]
        return self.predicting(rows)

    def predicting(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Of each text's logits, those at the positions before a written token."""
        cut = [row[start - 1 : -1] for row, start in zip(rows, self.prompt_lengths, strict=True)]
        return torch.cat(cut)


def mean_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(reference || other) over positions, in nats."""
    total = 0.0
    for expected, actual in zip(reference.split(64), other.split(64), strict=True):  # 25 MB at a time
        expected, actual = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
        total += float((expected.exp() * (expected - actual)).sum())
    return total / len(reference)


@pytest.fixture(scope="module")
def reference(smollm2_folder: Path) -> Reference:
    return Reference(smollm2_folder)


@pytest.fixture(scope="module")
def bf16_logits(reference: Reference, smollm2_gguf: Path) -> torch.Tensor:
    return engine_logits(reference, built(smollm2_gguf, "bf16"))


def engine_logits(reference: Reference, path: Path) -> torch.Tensor:
    with Engine.open(path) as engine:
        rows = score(CpuExecutor(engine, RuntimeConfig(max_num_seqs=1, max_logit_rows=512)), reference.texts)
        return reference.predicting([torch.from_numpy(row) for row in rows])


def test_bf16_engine_agrees_with_fp32(reference: Reference, bf16_logits: torch.Tensor) -> None:
    top = reference.fp32_logits.topk(2).values
    clear = top[:, 0] - top[:, 1] > tolerances.CLEAR_MARGIN
    assert clear.float().mean() >= 0.85, "too many positions have no clear winner for this test to mean anything"
    assert torch.equal(bf16_logits.argmax(-1)[clear], reference.fp32_logits.argmax(-1)[clear])
    ours, theirs = mean_kl(reference.fp32_logits, bf16_logits), mean_kl(reference.fp32_logits, reference.bf16_logits)
    print(
        f"\nmean KL to fp32: engine bf16 {ours:.6f}, transformers bf16 {theirs:.6f}; clear {clear.float().mean():.3f}"
    )
    assert ours <= theirs


@pytest.mark.parametrize("quant", tolerances.SMOLLM2_KL)
def test_quantized_engines_stay_close_to_fp32(reference: Reference, smollm2_gguf: Path, quant: str) -> None:
    logits = engine_logits(reference, built(smollm2_gguf, FORMS.get(quant, quant)))
    kl = mean_kl(reference.fp32_logits, logits)
    top1 = float((logits.argmax(-1) == reference.fp32_logits.argmax(-1)).double().mean())
    print(f"\nmean KL to fp32: engine {quant} {kl:.6f}; the same token first at {top1:.1%}")
    assert kl <= tolerances.SMOLLM2_KL[quant]
    assert top1 >= tolerances.SMOLLM2_TOP1[quant]


@pytest.mark.parametrize("kv_cache_dtype", tolerances.SMOLLM2_KV_KL)
def test_a_kv_cache_of_codes_stays_close_to_fp32(
    reference: Reference, bf16_logits: torch.Tensor, smollm2_gguf: Path, kv_cache_dtype: str
) -> None:
    logits = engine_logits(reference, built(smollm2_gguf, "bf16", kv_cache_dtype))
    kl = mean_kl(reference.fp32_logits, logits)
    top1 = float((logits.argmax(-1) == reference.fp32_logits.argmax(-1)).double().mean())
    print(f"\nmean KL to fp32: engine bf16 with {kv_cache_dtype} KV {kl:.6f}; the same token first at {top1:.1%}")
    print(f"mean KL to the engine with bf16 KV: {mean_kl(bf16_logits, logits):.6f}")
    assert kl <= tolerances.SMOLLM2_KV_KL[kv_cache_dtype]
    assert top1 >= tolerances.SMOLLM2_KV_TOP1[kv_cache_dtype]
