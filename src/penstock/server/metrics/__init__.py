"""Health checks and metrics of a server, over HTTP."""
