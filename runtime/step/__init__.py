"""Sequences, and the plan, arrays and sizes of a step that computes some of their tokens."""
