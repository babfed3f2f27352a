"""Read-only tools for a store's files. They never open the store."""
