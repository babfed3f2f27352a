"""A number with its noun, as text for people."""


def count_text(count: int, singular: str, plural: str = "") -> str:
    """`1 message`, `1,000 messages`; `plural` is for nouns that do not just add an s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
