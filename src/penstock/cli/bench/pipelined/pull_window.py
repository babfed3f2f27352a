"""Pulls of one connection: from each of its queues at most one at a time, up to the queue's end.

Cost model: compiled, a record takes 3 ns, plus the time for its memory.
"""

from array import array
from collections.abc import Sequence

from penstock.cli.bench.pipelined.frame_templates import FrameTemplates
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.cli.bench.pipelined.request_window import RequestWindow
from penstock.errors import FrameError
from penstock.wire import layout, octets

_SUCCESS = 0
_NOT_FOUND = 19
_OFFSET_MOVED = 21


class PullWindow(RequestWindow):
    """Reads queues from their begin to their end, and counts the messages in place."""

    def __init__(
        self,
        templates: FrameTemplates,
        size: int,
        recorder: LoadRecorder,
        spans: Sequence[tuple[int, int]],
        *,
        verify: bool,
    ) -> None:
        """`spans` are the first offset of each queue and the one behind its last. With `verify`
        the checksum of each body is checked."""
        RequestWindow.__init__(self, templates, size, recorder)
        # Nothing is requested from this time on.
        self.stop_ns: int = 0
        # Queues that are not read to their end.
        self.open: int = 0
        self._verify: bool = verify
        # By queue: the next offset and the end.
        self._offsets: memoryview = memoryview(array("q", [begin for begin, _ in spans]))
        self._ends: memoryview = memoryview(array("q", [end for _, end in spans]))
        # A ring of queues without a pull in flight, as long as there are queues.
        self._idle: memoryview = memoryview(array("i", bytes(4 * max(len(spans), 1))))
        self._idle_first: int = 0
        self._idle_count: int = 0
        for queue, (begin, end) in enumerate(spans):
            if begin < end:
                self._add_idle(queue)
                self.open += 1

    def fill(self, now_ns: int, now_ms: int) -> None:
        """Pull from queues without a pull in flight."""
        going_on = now_ns < self.stop_ns
        while going_on and self._free_count > 0 and self._idle_count > 0:
            queue = self._idle[self._idle_first]
            self._idle_first = (self._idle_first + 1) % len(self._idle)
            self._idle_count -= 1
            self._put_number(queue, self._offsets[queue])
            self._put_frame(queue, now_ns)

    def _add_idle(self, queue: int) -> None:
        self._idle[(self._idle_first + self._idle_count) % len(self._idle)] = queue
        self._idle_count += 1

    def _answered(self, slot: int, now_ns: int) -> int:
        request = self.request
        code = request.code
        queue = self._templates[slot]
        offset = self._offsets[queue]
        known = code == _SUCCESS or _NOT_FOUND <= code <= _OFFSET_MOVED
        self._release(slot, not known)
        if not known:  # pulled again when the slot is used again
            self.recorder.count_code(code, 1)
            self._add_idle(queue)
            return 0
        following = request.i64(b"nextBeginOffset")
        if code == _SUCCESS:
            if following <= offset:
                raise FrameError(
                    f"a pull from offset {offset} got messages, but its next offset is {following}"
                )
            self._count_records(request.body_at, request.body_at + request.body_length, now_ns)
        elif following <= offset:  # there are no messages up to the end, whatever it was before
            following = self._ends[queue]
        self._offsets[queue] = following
        if following < self._ends[queue]:
            self._add_idle(queue)
        else:
            self.open -= 1
        return 0

    def _count_records(self, at: int, end: int, now_ns: int) -> None:
        """Count the records in [at, end) of the buffer."""
        buffer = self.request.buffer
        messages = 0
        byte_count = 0
        while at < end:
            if end - at < layout.FIXED_BYTES:
                raise FrameError(f"the response to a pull ends with {end - at} bytes of a record")
            size = octets.get_i32(buffer, at + layout.SIZE_AT)
            magic = octets.get_i32(buffer, at + layout.MAGIC_AT)
            if size < layout.FIXED_BYTES or size > end - at:
                raise FrameError(f"the response to a pull has a record of {size} bytes")
            if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
                raise FrameError(f"the response to a pull has a record of the kind {magic:#x}")
            body_at = at + layout.body_at(octets.get_i32(buffer, at + layout.SYS_FLAG_AT))
            length = -1
            if body_at <= at + size:
                length = octets.get_i32(buffer, body_at - layout.BODY_LENGTH_BEFORE_BODY)
            if length < 0 or length > at + size - body_at:
                raise FrameError(f"the response to a pull has a body of {length} bytes")
            if self._verify:
                crc = octets.get_i32(buffer, at + layout.BODY_CRC_AT)
                if crc != octets.crc31(buffer, body_at, length):
                    self.recorder.corrupt += 1
            messages += 1
            byte_count += length
            at += size
        self.recorder.arrived(now_ns, messages, byte_count)
