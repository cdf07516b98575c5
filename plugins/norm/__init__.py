"""RMS and layer normalization, with and without a residual or a gate."""
