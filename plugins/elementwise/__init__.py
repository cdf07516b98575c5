"""Ops on each element, row or column by itself."""
