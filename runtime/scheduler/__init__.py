"""Plans each step, and applies its results to the sequences.

scheduler.py: builds steps from the running sequences, and commits sampled tokens. waiting.py: the queues of waiting
sequences, and their admission. shares.py: tokens computed for each tenant.
prefixes.py: prefixes that sequences share. stored.py: shared prefixes in stores. read_cost.py: what reading them costs.
chunks.py: chunked prefill, the prompt tokens of a step.
decodes.py: decode-only steps, planned from the step before.
"""
