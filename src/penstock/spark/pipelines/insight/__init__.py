"""The `insight` pipeline: a report about topics, keys and consumers."""
