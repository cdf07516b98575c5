"""The runtime: opens engine files, runs them on CPUs and GPUs, and serves them."""
