"""What a user has of a message; durations and delay levels."""

import pytest

from penstock.client.diagnosis.message_copies import level_delays_ms
from penstock.client.diagnosis.references import made_ms, read_offset_id, read_place
from penstock.client.diagnosis.wording import command_line, count_text, duration_text
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.message_ids import UniqueIds


def test_places() -> None:
    place = read_place(" orders/broker-a/3@1042 ")
    assert place is not None
    assert place.queue == MessageQueue("orders", "broker-a", 3)
    assert place.offset == 1042
    retry = read_place("%RETRY%billing/broker-a/0@0")
    assert retry is not None
    assert retry.queue.topic == "%RETRY%billing"
    for text in ("orders/3@1", "orders/broker-a/3", "orders/broker-a/x@1", f"a/b/1@{2**63}", ""):
        assert read_place(text) is None


def test_offset_ids() -> None:
    place = read_offset_id("7F00000100002A9F000000000001A6DD")
    assert place is not None
    assert (place.host, place.port, place.offset) == ("127.0.0.1", 10911, 0x1A6DD)
    assert read_offset_id("order-1") is None


def test_the_time_of_a_unique_id() -> None:
    now_ms = 1_795_000_000_000
    unique_id = UniqueIds(b"\x7f\0\0\1", pid=1, loader=2).next(now_ms)
    assert made_ms(unique_id, now_ms + 5_000) == now_ms
    assert made_ms("order-1", now_ms) is None


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0 ms"),
        (450, "450 ms"),
        (12_900, "12 s"),
        (60_000, "1 min"),
        (200_000, "3 min 20 s"),
        (7_500_000, "2 h 5 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_durations(ms: int, text: str) -> None:
    assert duration_text(ms) == text


def test_counts_and_commands() -> None:
    assert [count_text(n, "message") for n in (0, 1, 1234)] == [
        "0 messages",
        "1 message",
        "1,234 messages",
    ]
    assert command_line("dlq", "list", "a;b") == "penstock dlq list 'a;b'"


def test_delay_levels() -> None:
    assert level_delays_ms("1s 2m 3h 4d") == [1_000, 120_000, 10_800_000, 345_600_000]
    assert level_delays_ms("1s soon") == []
    assert level_delays_ms("") == []
