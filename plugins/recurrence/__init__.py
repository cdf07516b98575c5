"""Ops that carry a state from token to token: causal convolution, the gated delta rule, and Mamba-2."""
