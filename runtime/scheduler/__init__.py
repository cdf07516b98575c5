"""What runs in the next step, and what becomes of it.

scheduler.py: the steps, from the sequences that run. waiting.py: those that wait, which is the next, and how
it is admitted. shares.py: what each tenant has had.
prefixes.py: beginnings that sequences share. stored.py: those of them that are on disk.
chunks.py: how much of the prompts a step reads beside its decodes.
decodes.py: steps that only decode, planned from the one before.
"""
