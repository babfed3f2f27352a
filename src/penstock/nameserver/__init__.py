"""The NameServer: routes, registrations, key-value configuration."""
