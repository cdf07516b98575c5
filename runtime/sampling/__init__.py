"""Parameters of sampling, and the sampler that picks tokens from logits."""
