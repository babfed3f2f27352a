"""Buffers with poison around the bytes under test, and what was read from them as plain values.

What a reader makes of bytes may not depend on the bytes around them. Each guard is a byte that
would tempt a reader beyond its end: an empty length, a negative one, a digit, the end of a string,
the beginning of an escape, the end of a property. And the bytes are put against pages that can't
be read at all, so that a compiled reader which looks beyond them kills the run.
"""

import ctypes
import mmap
import re
from collections.abc import Callable
from typing import Any

from penstock.errors import WireError
from penstock.wire.frame import Request

GUARDS = (0x00, 0xFF, 0x31, 0x22, 0x5C, 0x02)
MARGIN = 24
_PAGE = mmap.PAGESIZE

Outcome = tuple[Any, ...]


def _fence() -> memoryview:
    """One page to read and write, between two that are neither."""
    pages = mmap.mmap(-1, 3 * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (start, start + 2 * _PAGE):
        failed = libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), 0)
        assert not failed, ctypes.get_errno()
    return memoryview(pages)[_PAGE : 2 * _PAGE]


_FENCED = _fence()


def outcome_within_guards(
    data: bytes, read: Callable[[memoryview, int, int], Outcome], *, changes: bool = False
) -> Outcome:
    """What `read(buffer, at, end)` gives, the same for all guards, which it leaves alone."""
    outcomes = []
    for guard in GUARDS:
        margin = bytes([guard]) * MARGIN
        target = bytearray(margin + data + margin)
        outcomes.append(read(memoryview(target), MARGIN, MARGIN + len(data)))
        assert target[:MARGIN] == margin
        assert target[MARGIN + len(data) :] == margin
        assert changes or target[MARGIN:-MARGIN] == data
    for at in (0, _PAGE - len(data)) if 0 < len(data) <= _PAGE else ():
        _FENCED[at : at + len(data)] = data
        outcomes.append(read(_FENCED[at : at + len(data)], 0, len(data)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def bound(data: bytes, **limits: int) -> Request:
    """A request bound to a buffer of exactly these bytes."""
    request = Request(**limits)
    request.bind(memoryview(bytearray(data)))
    return request


def read_frame(frame: bytes, **limits: int) -> Request:
    """The request of one whole frame, in a buffer of exactly its size."""
    request = bound(frame, **limits)
    assert request.read(0, len(frame)) == len(frame)
    assert request.missing == 0
    return request


def frame_outcome(buffer: memoryview, at: int, end: int) -> Outcome:
    """All values of the frame at `at`, or the WireError that it raises."""
    request = Request()
    request.bind(buffer)
    try:
        size = request.read(at, end)
    except WireError as error:
        relative = re.sub(r"(?<=at byte )\d+", lambda found: str(int(found[0]) - at), str(error))
        return (type(error), relative)
    if size == 0:
        return (0, request.missing)
    assert 8 <= size <= end - at
    assert at + 8 <= request.body_at <= at + size
    assert request.body_at + request.body_length == at + size
    numbers = []
    for field in range(request.count):
        assert (
            at
            <= request.value_at(field)
            <= request.value_at(field) + request.value_length(field)
            <= at + size
        )
        try:
            numbers.append((request.number(field), request.truth(field)))
        except WireError as error:
            numbers.append((str(error), request.truth(field)))
    letters = [request.letter(letter) for letter in range(97, 123)]
    return (
        size, request.encoding, request.code, request.flag, request.opaque, request.version,
        request.language, request.remark(), request.ext(), request.body(), numbers, letters,
    )  # fmt: skip
