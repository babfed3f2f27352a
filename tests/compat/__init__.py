"""Tests against the real RocketMQ: its classes, its clients, its servers."""
