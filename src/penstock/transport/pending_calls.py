"""The calls that wait for a response on one connection. No sockets.

`expect` adds a call, its request is written into `output`, `flush_soon` sends the output.
`take_responses` gives the responses among the received bytes to their calls.
"""

from collections.abc import Callable

from penstock.errors import PeerError, PenstockError
from penstock.wire.frame import Request
from penstock.wire.output import Output

CALLS_MAX = 65_536
"""Most calls that wait for a response on one connection."""
BATCH_BYTES_MAX = 64 * 1024
"""Most bytes that wait for the end of a loop iteration; a longer frame is sent at once."""
NEVER_MS = 1 << 62

_CALLS_MAX = CALLS_MAX
_BATCH_BYTES_MAX = BATCH_BYTES_MAX
_NEVER_MS = NEVER_MS
_RESPONSE = 1

_int = int  # hides annotations from the compiler, keeps them for mypy


class Call:
    """A request that waits for its response. Times are by the monotonic clock."""

    def __init__(self, code: _int, timeout_ms: _int, deadline_ms: _int) -> None:
        self.code: int = code
        self.timeout_ms: int = timeout_ms
        self.deadline_ms: int = deadline_ms
        self.sent_ms: int = 0  # when the request was written
        self.answered_ms: int = 0  # when the response arrived
        self.reads: int = 0  # the connection's number of reads when the call was added

    def answered(self, request: Request) -> None:
        """Take the response, whose bytes are valid only during the call. Must not raise."""

    def failed(self, error: PenstockError) -> None:
        """There will be no response. Must not raise."""


class PendingCalls:
    """The calls of one connection, which provides `set_alarm`, `schedule_flush` and `flush`."""

    def __init__(
        self,
        address: str,
        frame_bytes_max: _int,
        set_alarm: Callable[[int], None],
        schedule_flush: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self.address: str = address
        # By opaque.
        self.pending: dict[int, Call] = {}
        # Frames that are not written to the transport yet.
        self.output: Output = Output()
        # The frame that was read last, valid until the next one.
        self.request: Request = Request(frame_bytes_max)
        # How often bytes were received.
        self.reads: int = 0
        # When deadlines are checked next.
        self.alarm_ms: int = NEVER_MS
        # The transport's buffer is full.
        self.paused: bool = False
        # The output is sent at the end of this loop iteration.
        self.flush_scheduled: bool = False
        # `request` is a request of the server, not a response.
        self.has_request: bool = False
        self._opaque: int = 0
        self._set_alarm: Callable[[int], None] = set_alarm
        self._schedule_flush: Callable[[], None] = schedule_flush
        self._flush: Callable[[], None] = flush

    def next_opaque(self) -> _int:
        """A number for a request; raises PeerError if too many calls wait."""
        if len(self.pending) >= _CALLS_MAX:
            raise PeerError.over(
                f"{self.address}: calls that wait for a response",
                figure=len(self.pending) + 1,
                limit=CALLS_MAX,
                unit="calls",
            )
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    def expect(self, call: Call) -> _int:
        """Add a call; returns the opaque of its request."""
        opaque = self.next_opaque()
        call.reads = self.reads
        self.pending[opaque] = call
        if call.deadline_ms < self.alarm_ms:
            self._set_alarm(call.deadline_ms)
        return opaque

    def flush_soon(self) -> None:
        """Send the output at the end of this loop iteration, or now if it is long."""
        if self.output.length > _BATCH_BYTES_MAX:
            self._flush()
        elif not self.flush_scheduled:
            self.flush_scheduled = True
            self._schedule_flush()

    def take_responses(self, at: _int, end: _int, now_ms: _int) -> _int:
        """Give the responses in the bytes [at, end) of the bound buffer to their calls.

        Returns where the first incomplete frame begins; stops after a request of the server
        (`has_request`). Raises a WireError for a frame that violates the protocol.
        """
        request = self.request
        self.has_request = False
        while True:
            length = request.read(at, end)
            if length == 0:
                return at
            at += length
            if request.flag & _RESPONSE == 0:
                self.has_request = True
                return at
            call = self.pending.pop(request.opaque, None)
            if call is not None:  # otherwise its caller has given up
                call.answered_ms = now_ms
                call.answered(request)
