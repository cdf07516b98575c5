"""Ahead-of-time engine builder for large language models, and the runtime that serves what it builds."""

from importlib.metadata import version

__version__ = version("enginewright")
