"""`penstock bench`: measures a running cluster."""
