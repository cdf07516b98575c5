"""Ahead-of-time engine builder for large language models, and the runtime that serves what it builds."""

__version__ = "0.1.0"
