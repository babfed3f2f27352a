"""Delay levels, timer messages and recall."""
