"""To be written: scheduled."""
