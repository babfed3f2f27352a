"""Tests with a real Spark.

- conftest: one session (`spark`, local[2]) and one Penstock (`cluster`) for all tests of a run.
- kit: topics, messages and waiting, for these tests.
- standalone: a master, its workers, and a Connect server, as processes from the pip package.
"""
