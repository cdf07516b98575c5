"""Sequences, and the arrays and sizes of the step that computes some of their tokens."""
