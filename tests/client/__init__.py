"""Our Python client against both houses: Penstock's servers, and Apache RocketMQ's own.

Every test runs twice, through the fixture `house` of conftest.py. What a test asks for is what
RocketMQ does; where the two houses may differ the test says so.
"""
