"""What the console knows of the cluster: snapshots, their history, lag and alarms."""
