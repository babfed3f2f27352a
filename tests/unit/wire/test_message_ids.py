"""Message ids: layout, round trips and invalid text."""

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import ip_address
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HeaderError
from penstock.wire.message_ids import (
    UniqueIds,
    decode_offset_id,
    decode_unique_id,
    encode_offset_id,
    month_start_ms,
)

addresses = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
LOCALHOST = bytes([127, 0, 0, 1])


def ms(*moment: int, zone: timezone | ZoneInfo = UTC) -> int:
    return round(datetime(*moment, tzinfo=zone).timestamp() * 1000)  # type: ignore[misc,arg-type]


def test_offset_id_of_the_reference() -> None:
    text = "7F00000100002A9F000000000001E240"
    assert encode_offset_id(LOCALHOST, 10911, 123456) == text
    found = decode_offset_id(text.lower())
    assert found == (LOCALHOST, 10911, 123456)
    assert found.host == "127.0.0.1"


@given(addresses, st.integers(0, 65535), st.integers(0, 2**63 - 1))
def test_offset_id_round_trip(ip: bytes, port: int, offset: int) -> None:
    text = encode_offset_id(ip, port, offset)
    assert len(text) == (32 if len(ip) == 4 else 56)
    found = decode_offset_id(text)
    assert found == (ip, port, offset)
    assert ip_address(found.host).packed == ip


@given(st.text(max_size=60) | st.text("0123456789ABCDEFabcdef G-", min_size=32, max_size=32))
def test_invalid_offset_ids_raise_only_header_error(text: str) -> None:
    for decode in (decode_offset_id, decode_unique_id):
        with contextlib.suppress(HeaderError):
            decode(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7F00000100002A9F000000000001E24",
        "7F00000100002A9F000000000001E2 40",
        "  " * 16,
        "G" * 32,
        "٣" * 32,
        "7F000001FFFFFFFF0000000000000000",  # port
        "7F00000100002A9FFFFFFFFFFFFFFFFF",  # offset
    ],
)
def test_text_that_is_not_an_offset_id_is_refused(text: str) -> None:
    with pytest.raises(HeaderError):
        decode_offset_id(text)


@given(
    addresses,
    st.integers(0, 2**32),
    st.integers(-(2**31), 2**32),
    st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
    st.sampled_from([UTC, timezone(timedelta(hours=8)), ZoneInfo("America/New_York")]),
)
def test_unique_id_has_time_and_address(
    ip: bytes, pid: int, loader: int, now: datetime, zone: timezone | ZoneInfo
) -> None:
    now_ms = round(now.timestamp() * 1000)
    text = UniqueIds(ip, pid=pid, loader=loader, counter=65535, zone=zone).next(now_ms)
    assert text == text.upper()
    found = decode_unique_id(text)
    assert found.ip == ip
    assert found.host == str(ip_address(ip))
    assert found.pid == pid & 0xFFFF
    assert found.loader == loader & 0xFFFFFFFF
    assert found.counter == 65535
    for later_ms in (0, 60_000, 3 * 86_400_000):
        assert found.born_ms(now_ms + later_ms, zone) == now_ms


def test_unique_ids_differ_within_a_millisecond() -> None:
    ids = UniqueIds(LOCALHOST, pid=1, loader=2, zone=UTC)
    made = [ids.next(ms(2024, 5, 5)) for _ in range(65536)]
    assert len(set(made)) == 65536
    assert made[0].endswith("0000")
    assert ids.next(ms(2024, 5, 5)) == made[0]


def test_the_time_in_a_unique_id_restarts_each_month() -> None:
    ids = UniqueIds(LOCALHOST, pid=1, loader=2, zone=UTC)
    moments = [ms(2024, 1, 31, 23, 59, 59), ms(2024, 2, 1), ms(2024, 2, 29), ms(2024, 3, 1, 0, 1)]
    spans = [decode_unique_id(ids.next(moment)).ms for moment in moments]
    assert spans == [31 * 86_400_000 - 1000, 0, 28 * 86_400_000, 60_000]


def test_unique_ids_follow_a_clock_that_is_set_back() -> None:
    ids = UniqueIds(LOCALHOST, pid=1, loader=2, zone=UTC)
    start = ms(2024, 2, 1)
    assert decode_unique_id(ids.next(start)).ms == 0
    assert decode_unique_id(ids.next(start - 500)).ms == 0
    assert decode_unique_id(ids.next(start - 86_400_000)).ms == 30 * 86_400_000
    assert decode_unique_id(ids.next(start + 5)).ms == 5


def test_month_starts_in_local_time() -> None:
    zone = timezone(timedelta(hours=8))
    assert month_start_ms(ms(2024, 3, 1, zone=zone), zone) == ms(2024, 3, 1, zone=zone)
    assert month_start_ms(ms(2024, 3, 1, zone=zone) - 1, zone) == ms(2024, 2, 1, zone=zone)
    local = datetime.fromtimestamp(month_start_ms(1_700_000_000_123) / 1000)
    assert (local.day, local.hour, local.minute, local.microsecond) == (1, 0, 0, 0)
