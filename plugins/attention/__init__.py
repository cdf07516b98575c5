"""Attention over dense and paged keys and values, the writes to their pools, and rotary embeddings."""
