"""Filters by SQL92 expression: parsing, evaluation, filtered reads."""
