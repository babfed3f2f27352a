"""POP consumers."""
