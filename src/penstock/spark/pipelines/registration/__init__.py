"""The `registration` pipeline: registrations, their follow-up steps and stuck users."""
