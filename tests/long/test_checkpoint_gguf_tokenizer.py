"""A real tokenizer on more texts than `make test` has time for."""

from pathlib import Path

from tests.checkpoint.test_gguf_tokenizer import check_real_tokenizer


def test_real_tokenizer(smollm2_gguf: Path) -> None:
    check_real_tokenizer(smollm2_gguf, 2000)
