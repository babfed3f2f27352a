"""Where named contexts are kept: the file in the user's config directory."""
