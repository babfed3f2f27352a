"""The commands that run servers: up, broker, nameserver, controller, console."""
