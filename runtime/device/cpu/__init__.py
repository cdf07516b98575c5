"""Engines on CPUs: the executor."""
