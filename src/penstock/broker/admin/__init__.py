"""Requests of the admin tools."""
