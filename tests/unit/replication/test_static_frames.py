"""Frames of DefaultHAService: golden bytes, truncation, limits, garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ReplicationError
from penstock.replication.frame_limits import BODY_BYTES_MAX
from penstock.replication.static_frames import (
    HEADER_BYTES,
    StaticHeader,
    encode_header,
    encode_report,
    newest_report,
    read_header,
)
from tests.unit.replication.strategies import I64_MAX, OFFSETS

HEADERS = st.builds(
    StaticHeader, st.integers(0, I64_MAX - BODY_BYTES_MAX), st.integers(0, BODY_BYTES_MAX)
)


def test_golden_bytes() -> None:
    assert encode_report(0x0102030405060708).hex() == "0102030405060708"
    assert encode_header(0x40000000, 0x8000).hex() == "000000004000000000008000"


@given(HEADERS, st.binary(max_size=5))
def test_a_header_is_read_once_it_is_complete(header: StaticHeader, before: bytes) -> None:
    data = before + encode_header(*header) + b"body"
    at = len(before)
    for end in range(at, len(data) + 1):
        complete = end - at >= HEADER_BYTES
        assert read_header(memoryview(data), at, end) == (header if complete else None)


@given(st.lists(OFFSETS, max_size=5), st.integers(0, 7))
def test_the_newest_complete_report_counts(offsets: list[int], incomplete: int) -> None:
    data = b"".join(map(encode_report, offsets)) + bytes(incomplete)
    newest = offsets[-1] if offsets else None
    assert newest_report(memoryview(data), len(data)) == (newest, 8 * len(offsets))


def test_only_the_bytes_before_the_end_count() -> None:
    data = memoryview(encode_report(5) + encode_report(9))
    assert newest_report(data, 15) == (5, 8)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, -1), (0, BODY_BYTES_MAX + 1), (0, 2**31 - 1), (-1, 0), (-1, 5), (I64_MAX, 1)],
)
def test_an_impossible_header_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ReplicationError):
        read_header(memoryview(encode_header(offset, length)), 0, HEADER_BYTES)


def test_a_negative_report_is_refused() -> None:
    with pytest.raises(ReplicationError):
        newest_report(memoryview(encode_report(-1)), 8)


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    view = memoryview(data)
    for read in (lambda: read_header(view, 0, len(data)), lambda: newest_report(view, len(data))):
        try:
            read()
        except ReplicationError:
            continue
