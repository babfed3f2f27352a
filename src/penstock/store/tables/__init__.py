"""The small tables of a broker and their files."""
