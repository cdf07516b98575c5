"""Executors of a plan on CPUs and GPUs, and the plan of the memory that an engine takes there."""
