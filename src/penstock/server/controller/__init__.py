"""Runs a controller: its states on disk, its heartbeats, its notifications."""
