"""The protocol and the record format: bytes to values and back."""
