"""Incoming connections: the only package of the servers that uses asyncio and sockets."""
