"""`penstock check` for monitoring systems, `penstock doctor` for people."""
