"""What sequences leave behind them between steps: who holds which place, what is shared, and what is kept for later.

cache.py: all groups of a plan together, which is what the scheduler talks to. kind.py: the questions that each kind of
group answers. paged.py, recurrent.py: the kinds. pool.py: places with reference counts, found again by keys. keys.py:
the keys.
"""
