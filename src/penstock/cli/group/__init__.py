"""`penstock group …`: consumer groups of a cluster."""
