"""Benchmarks, each with a comparison in the same run: `make bench`, `python -m benchmarks NAME`."""
