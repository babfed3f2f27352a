"""Penstock beside other brokers in one run: `python -m benchmarks peers`, `make bench`."""
