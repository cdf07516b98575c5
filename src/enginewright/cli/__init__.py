"""The `engine` command: it reads options, calls the rest of the product, and prints reports."""

from enginewright.cli.engine import main

__all__ = ["main"]
