"""Text of a model: tokenizers, chat templates, detokenization, and the formats of messages."""
