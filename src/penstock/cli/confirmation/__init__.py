"""The plan of a change and the question before it."""
