"""Text in and out of a model: tokenizers, chat templates, detokenization, and the format of messages."""
