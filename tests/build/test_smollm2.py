"""A real model against transformers: its file is read alike, and its engine generates the same tokens, by logits that
are no further from fp32 than bf16 is.

The text is what transformers writes greedily in fp32 after some prompts; every implementation is then given that
text (teacher forcing), and its next-token distributions at the 64 written positions are compared with fp32's.
"""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import Fp8
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.engines import built
from tests.helpers.prompts import PROMPTS
from tests.helpers.tiny_gguf import state_of

NEW_TOKENS = 64
TEXTS = 5
TEXTS_OF_BF16 = 2  # transformers takes five times as long for them as in fp32, where a CPU has no bf16 of its own
FORMS = {"fp8 block": Fp8(fp8_scales="block")}


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers reads from the same file."""
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> PreTrainedModel:
    """The model that transformers reads from the same file, in fp32."""
    config = GgufConfig(dequantize=True)
    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=config
    ).eval()


def test_the_file_is_read_as_transformers_reads_it(smollm2_gguf: Path, model: PreTrainedModel) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    state = state_of(model)
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert checkpoint.tensors[name].dtype == torch.float32
        assert checkpoint.tensors[name].shape == tensor.shape
        assert torch.equal(checkpoint.read(name), tensor), name
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert checkpoint.config["model_type"] == "llama"
    config = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    read, expected = AutoConfig.for_model("llama", **config).to_dict(), model.config.to_dict()
    for key in config.keys() & expected.keys() - {"rms_norm_eps"} | {"rope_parameters"}:
        assert read[key] == expected[key], key
    assert np.float32(read["rms_norm_eps"]) == np.float32(expected["rms_norm_eps"])
    assert checkpoint.generation_config == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}


def test_so_is_the_tokenizer(smollm2_gguf: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = open_checkpoint(str(smollm2_gguf)).tokenizer
    assert files.chat_template == tokenizer.chat_template
    assert files.config["bos_token"] == "<|im_start|>"
    assert files.config["eos_token"] == "<|im_end|>"
    assert files.config["add_bos_token"] is False


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model with weights rounded to bfloat16, which computes in a dtype. Angles stay as they are."""
    copied = deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return copied


class Reference:
    """transformers on weights in bf16: texts as token ids, and logits at the positions that predict new tokens."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        fp32 = rounded(model, torch.float32)
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            for prompt in PROMPTS[:: len(PROMPTS) // TEXTS]
        ]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        longest = max(self.prompt_lengths)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        written = fp32.generate(
            padded, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        self.texts = [prompt + row[longest:].tolist() for prompt, row in zip(prompts, written, strict=True)]
        self.fp32_logits = self.logits(fp32, self.texts)
        self.bf16_logits = self.logits(rounded(model, torch.bfloat16), self.texts[:TEXTS_OF_BF16])

    @torch.inference_mode()
    def logits(self, model: torch.nn.Module, texts: list[list[int]]) -> torch.Tensor:
        """Logits at the positions before generated tokens, [tokens, vocabulary]."""
        kept = [model(torch.tensor([text]), logits_to_keep=NEW_TOKENS + 1).logits[0, :-1] for text in texts]
        return torch.cat(kept).float()

    def predicting(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The rows of each text's logits at the positions before generated tokens."""
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
def reference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reference:
    return Reference(model, tokenizer)


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
    count = len(reference.bf16_logits)
    fp32 = reference.fp32_logits[:count]
    ours, theirs = mean_kl(fp32, bf16_logits[:count]), mean_kl(fp32, reference.bf16_logits)
    print(
        f"\nmean KL to fp32: engine bf16 {ours:.6f}, transformers bf16 {theirs:.6f}; clear {clear.float().mean():.3f}"
    )
    assert ours <= theirs


SOME_QUANTS, SOME_KV = ("int4-rtn",), ("int8",)  # tests/long has the others


@pytest.mark.parametrize("quant", SOME_QUANTS)
def test_quantized_engines_stay_close_to_fp32(reference: Reference, smollm2_gguf: Path, quant: str) -> None:
    logits = engine_logits(reference, built(smollm2_gguf, FORMS.get(quant, quant)))
    kl = mean_kl(reference.fp32_logits, logits)
    top1 = float((logits.argmax(-1) == reference.fp32_logits.argmax(-1)).double().mean())
    print(f"\nmean KL to fp32: engine {quant} {kl:.6f}; the same token first at {top1:.1%}")
    assert kl <= tolerances.SMOLLM2_KL[quant]
    assert top1 >= tolerances.SMOLLM2_TOP1[quant]


@pytest.mark.parametrize("kv_cache_dtype", SOME_KV)
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
