"""Synchronous clients: the asyncio clients on an event loop in a background thread."""
