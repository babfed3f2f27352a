"""The commands for messages: message, send, tail, dlq, explain, scheduled, transaction."""
