"""What a slave copies from its master, and how it continues as the next master."""
