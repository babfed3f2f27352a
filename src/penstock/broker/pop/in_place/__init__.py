"""The usual requests of POP, in the connection's buffer."""
