"""Checkpoints in GGUF files: header, keys, tensor names, tokenizer, and differences between families."""
