"""Broker sets and elections: which replica of a broker is its master. Decisions without I/O."""
