"""Delay levels, timed messages and recall."""
