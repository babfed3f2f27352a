"""Connected clients, groups, heartbeats, consumer offsets, queue locks and assignment."""
