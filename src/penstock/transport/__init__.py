"""Outgoing connections: peers, pending calls, TLS contexts."""
