"""Producers: sending, retries, batching, request-reply."""
