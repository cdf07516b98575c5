"""Engines on NVIDIA GPUs: the driver's API, weights on their way there, and the executor."""
