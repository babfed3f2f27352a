"""Logins, sessions, protection of requests, and the audit log of the console."""
