"""Master-slave replication: epochs, frames of the HA port, authentication of peers."""
