"""Replicas of a broker: their state, promotion."""
