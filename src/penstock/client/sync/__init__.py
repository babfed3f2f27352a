"""The synchronous clients: the asynchronous ones behind an event loop in a thread."""
