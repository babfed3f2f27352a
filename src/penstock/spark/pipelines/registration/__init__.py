"""Pipeline `registration`: registrations, their follow-up steps, and users who are stuck."""
