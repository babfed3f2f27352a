"""The commands for users and access rules."""
