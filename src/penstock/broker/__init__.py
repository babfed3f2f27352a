"""The broker's decisions: request in, answer out. No event loop, socket or clock."""
