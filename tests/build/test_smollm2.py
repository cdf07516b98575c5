"""A real model against transformers: its file is read alike, and its engine generates the same tokens, by logits that
are no further from fp32 than bf16 is.

The text is what the engine in bf16 writes greedily after some prompts; every implementation is then given that
text (teacher forcing), and its next-token distributions at the 64 written positions are compared with those of
transformers in fp32.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import gguf
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

from enginewright import LLM, SamplingParams
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.checkpoint.gguf.header import read_header
from enginewright.passes.quant import Fp8
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.checkpoint.test_gguf_tokenizer import check_real_tokenizer
from tests.helpers.engines import built
from tests.helpers.prompts import PROMPTS
from tests.helpers.tiny_gguf import state_of

NEW_TOKENS = 64
TEXTS = 2  # tests/long has more
TEXTS_OF_BF16 = 1  # transformers takes five times as long for it as in fp32, where a CPU has no bf16 of its own
FORMS = {"fp8 block": Fp8(fp8_scales="block")}


@pytest.fixture(scope="module")
def reader(smollm2_gguf: Path) -> Iterator[gguf.GGUFReader]:
    """The gguf package's reader of the file, whose start takes seconds; transformers would start four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        yield gguf.GGUFReader(str(smollm2_gguf))


@pytest.fixture(scope="module")
def tokenizer(reader: gguf.GGUFReader, smollm2_gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers reads from the same file."""
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def model(reader: gguf.GGUFReader, smollm2_gguf: Path) -> PreTrainedModel:
    """The model that transformers reads from the same file, in fp32."""
    config = GgufConfig(dequantize=True)
    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=config
    ).eval()


def test_the_header_is_read_as_the_gguf_package_reads_it(smollm2_gguf: Path, reader: gguf.GGUFReader) -> None:
    header = read_header(smollm2_gguf)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key in fields.keys() - {"tokenizer.ggml.tokens", "tokenizer.ggml.merges"}:  # slow to read there
        read, expected = header.metadata[key], fields[key].contents()
        if isinstance(expected, float) and isinstance(read, float):
            read = float(np.float32(read))
        assert (type(read), read) == (type(expected), expected), key
    assert list(header.metadata["tokenizer.ggml.tokens"])[:100] == fields["tokenizer.ggml.tokens"].contents(slice(100))  # type: ignore[arg-type]
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        place = header.tensors[tensor.name]
        assert place.type == tensor.tensor_type
        assert place.shape == tuple(tensor.shape.tolist()[::-1])
        assert (place.offset_bytes, place.nbytes) == (tensor.data_offset, tensor.n_bytes)


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


def test_texts_become_the_same_tokens(smollm2_gguf: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    check_real_tokenizer(smollm2_gguf, tokenizer, 500)


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model with weights rounded to bfloat16, which computes in a dtype. Angles stay as they are."""
    copied = deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    return copied


class Reference:
    """transformers on weights in bf16: logits at the positions that predict the new tokens of texts."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> None:
        self.texts, self.prompt_lengths = texts, [len(prompt) for prompt in prompts]
        self.new_tokens = [token for text in texts for token in text[-NEW_TOKENS:]]
        self.fp32_logits = self.logits(rounded(model, torch.float32), texts)
        self.bf16_logits = self.logits(rounded(model, torch.bfloat16), texts[:TEXTS_OF_BF16])

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
def reference(
    request: pytest.FixtureRequest, smollm2_gguf: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Reference:
    texts_count: int = request.module.TEXTS
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS[:: -(-len(PROMPTS) // texts_count)]
    ]
    with LLM(built(smollm2_gguf, "bf16"), max_model_len=256, max_num_seqs=texts_count) as llm:
        written = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
    texts = [prompt + list(one.outputs[0].token_ids) for prompt, one in zip(prompts, written, strict=True)]
    return Reference(model, prompts, texts)


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
    assert clear.float().mean() >= 0.8, "too many positions have no clear winner for this test to mean anything"
    assert torch.equal(bf16_logits.argmax(-1)[clear], reference.fp32_logits.argmax(-1)[clear])
    assert bf16_logits.argmax(-1).tolist() == reference.new_tokens
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
