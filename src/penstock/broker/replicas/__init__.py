"""A broker as a replica: its role, and the state of its replication."""
