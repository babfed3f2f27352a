"""The log of a slave: bytes that it receives from its master."""
