"""Formats, a file for each, found by its name: `open(config, tensors)` makes its reader."""
