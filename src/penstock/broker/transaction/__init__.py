"""Transactional messages: half messages, commit and rollback, check-back."""
