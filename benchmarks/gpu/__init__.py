"""Correctness and speed of this project on the GPU at hand: `python -m benchmarks.gpu`."""
