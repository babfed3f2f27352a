"""The NameServer's decisions: routes, registrations, key-value configuration."""
