"""To be written: transactions."""
