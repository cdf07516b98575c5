"""Heads that were trained to propose draft tokens from a model's hidden states, in folders of their own."""
