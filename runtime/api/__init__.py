"""Python API: LLM, AsyncLLM, embeddings, and the thread that runs an engine's steps."""
