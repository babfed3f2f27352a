"""Speed claims, each with its peer in the same run: `make bench`, `python -m benchmarks NAME`."""
