"""Records to Arrow columns, without a Python object per row."""
