"""What this project is worth on the GPU at hand: `python -m benchmarks.gpu`."""
