"""Opening a store in any state: checkpoint, recovery, replay of the log."""
