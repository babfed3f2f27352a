"""`penstock export` and `penstock import`: the definitions of a cluster as one file."""
