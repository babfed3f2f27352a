"""Administration of a cluster through its protocol."""
