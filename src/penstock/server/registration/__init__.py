"""A broker and its NameServers: registration, the name, the address, route queries."""
