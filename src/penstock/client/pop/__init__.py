"""POP consumers: messages are invisible for a while and have to be acknowledged."""
