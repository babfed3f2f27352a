"""Pull consumers: the application polls for messages."""
