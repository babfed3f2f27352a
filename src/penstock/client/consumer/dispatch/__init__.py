"""Dispatch of messages to handlers or iterators, and their completion."""
