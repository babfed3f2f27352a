"""Pipeline `insight`: a report about topics, keys and consumers."""
