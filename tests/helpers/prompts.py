"""Prompts: twenty of mixed kinds, for tests that compare whole texts, and random ones."""

from collections.abc import Sequence

import numpy as np

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List three fruits that are red.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is 17 times 23?",
    "Summarize the story of Romeo and Juliet in two sentences.",
    "Write a Python function that reverses a string.",
    "Who wrote the Origin of Species?",
    "Name the planets of the solar system.",
    "What does an operating system do?",
    "How do I remove a coffee stain from a shirt?",
    "Tell me a joke about a cat.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Describe the water cycle to a child.",
    "Write an email asking for a day off.",
    "What are the rules of chess for the knight?",
    "Say something about the number zero.",
]


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens of a tiny model, without special ones."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 300, length).tolist() for length in lengths]
