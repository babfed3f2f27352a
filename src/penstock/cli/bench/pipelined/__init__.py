"""The compiled load generator behind `--pipeline`: many requests in flight on each connection."""
