"""Transaction producers and check-backs."""
