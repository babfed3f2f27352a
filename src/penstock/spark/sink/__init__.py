"""The Spark sink: at-least-once and transactional writes to topics."""
