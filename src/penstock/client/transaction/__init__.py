"""Transaction producers: half messages, commit and rollback, check-backs."""
