"""A real tokenizer on more texts than `make test` has time for."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.checkpoint.test_gguf_tokenizer import check_real_tokenizer


def test_real_tokenizer(smollm2_gguf: Path) -> None:
    plain = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    check_real_tokenizer(smollm2_gguf, plain, 2000)
