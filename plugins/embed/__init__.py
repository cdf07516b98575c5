"""Rows of embedding tables."""
