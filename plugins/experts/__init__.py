"""Mixtures of experts: routing, sorted rows, products by expert, and the weighted sum."""
