"""The HA port: connections of slaves to their master, and what they do to the store."""
