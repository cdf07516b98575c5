"""Checkpoints in GGUF files: header, keys, tensor names, tokenizer, and what differs by family."""
