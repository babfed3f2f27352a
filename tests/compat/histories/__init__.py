"""Histories of failovers: real processes, faults by seed, a checker that judges what clients saw.

    python -m tests.compat.histories 17          # the history of seed 17
    python -m tests.compat.histories 0-499       # many, one after another

`test_histories.py` runs them as tests.
"""
