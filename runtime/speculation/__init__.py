"""Guesses of the tokens that come next, which a step verifies at once: faster answers, the same bits.

proposer.py: what guesses. lookup.py: texts that repeat themselves. draft.py: a smaller model. methods.py: their names.
speculator.py: how many guesses of which sequence pay, and what becomes of them. acceptance.py: how likely a guess is
right.
"""
