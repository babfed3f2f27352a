"""How received messages reach handlers, and what happens to them afterwards."""
