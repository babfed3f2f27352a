"""Numbers with their nouns."""

from penstock.plurals import count_text


def test_one_is_singular() -> None:
    assert count_text(1, "message") == "1 message"
    assert count_text(0, "message") == "0 messages"
    assert count_text(1_000, "message") == "1,000 messages"
    assert count_text(2, "reply", "replies") == "2 replies"
