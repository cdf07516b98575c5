"""Sampling parameters, token masks, and the sampler that turns logits into tokens."""
