"""Heads: what is trained to guess for a model, from its hidden states, and comes in a folder of its own."""
