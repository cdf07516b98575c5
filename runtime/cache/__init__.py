"""The KV caches and recurrent states of all sequences: which sequence holds which block or slot, and prefix caching.

cache.py: all cache groups of a plan together, as the scheduler uses them. kind.py: the interface of one cache group.
paged.py, recurrent.py: its two implementations. pool.py: the blocks or slots of a group, with reference counts and an
index by key. keys.py: the keys. events.py: notices of blocks that can be found, or no longer can.

store.py: stores of blocks and snapshots outside this memory. disk.py: the disk. remote.py: what servers share, in an
object store (s3.py) or in the memory of one of them (peer.py). channel.py: connections between servers. leases.py:
prompts that another server fetches.

A place is a block of a paged group, or a slot of a recurrent one. A place can be found when it is in the index: a new
sequence with the same prefix then shares it.
"""
