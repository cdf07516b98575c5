"""Speculative decoding: one step verifies several draft tokens, which is faster and gives the same answers bit by bit.

proposer.py: the interface of all sources of draft tokens. lookup.py: earlier text. draft.py: a smaller model.
head.py: MTP layers and EAGLE-3. medusa.py: Medusa heads. methods.py: their names, and the memory that they take.
speculator.py: how many draft tokens each sequence gets. acceptance.py: how likely a draft token is accepted.
stats.py: counts of draft tokens and of accepted ones.
"""
