"""Pulls: checks, subscriptions, reads, the suggested broker."""
