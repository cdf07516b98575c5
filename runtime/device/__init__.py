"""Executors, which run a plan on a CPU or a GPU, and the memory plan of an engine there."""
