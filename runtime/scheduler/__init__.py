"""What runs in the next step, and what becomes of it.

scheduler.py: the steps, from the sequences that run. waiting.py: those that wait, and how they are admitted.
prefixes.py: beginnings that sequences share. chunks.py: how much of the prompts a step reads beside its decodes.
decodes.py: steps that only decode, planned from the one before.
"""
