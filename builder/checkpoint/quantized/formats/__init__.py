"""One file a format, found by its name: `open(config, tensors)` makes its reader."""
