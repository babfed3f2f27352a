"""The Python client against two clusters: Penstock's servers, and Apache RocketMQ's 5.4 and 5.5.

Every test runs twice, through the fixture `cluster` of conftest.py. Tests expect the behaviour of
RocketMQ; where the two clusters may differ the test says so.
"""
