"""The text of the search box."""

from datetime import datetime, timedelta

import pytest

from penstock.console.messages.search_text import SearchText, parse_search
from penstock.errors import InvalidParameter

ID = "7F00000100002A9F0000000000001F8F"
NOW_MS = 1_800_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000).astimezone()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", SearchText()),
        ("ORD-7", SearchText(key="ORD-7")),
        ("key:a:b", SearchText(key="a:b")),
        ("a:b", SearchText(key="a:b")),
        (ID, SearchText(reference=ID)),
        ("orders/broker-a/0@17", SearchText(reference="orders/broker-a/0@17")),
        ("id:short", SearchText(reference="short")),
        ("queue:broker-a/3 offset:120", SearchText(broker="broker-a", queue=3, offset=120)),
        ("queue:3", SearchText(queue=3)),
        ("tag:a tag:b", SearchText(tags=("a", "b"))),
        ("since:-1h", SearchText(since=NOW - timedelta(hours=1))),
        ('body:"two words"', SearchText(body="two words")),
        ('sql:"a > 5 and b = \'x\'"', SearchText(sql="a > 5 and b = 'x'")),
        ("topic:orders ORD-7", SearchText(topic="orders", key="ORD-7")),
    ],
)  # fmt: skip
def test_words_and_filters(text: str, wanted: SearchText) -> None:
    assert parse_search(text, NOW_MS) == wanted


@pytest.mark.parametrize(
    "text", ['body:"open', "queue:x", "offset:-1", "since:yesterday", "one two", "key:a key:b"]
)
def test_what_cannot_be_read_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        parse_search(text, NOW_MS)
    assert error.value.hint
