"""Pull consumers."""
