"""The builder: turns a checkpoint into an engine file."""
