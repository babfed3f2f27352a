"""Messages that consumers send back: retry topics and dead letters."""
