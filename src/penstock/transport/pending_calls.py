"""Calls that wait on a connection, and the frames of one turn in both directions. No sockets.

A call is put on by `expect`, its request goes into `output`, `push` sees to it that the output
leaves. `take` hands the answers among the bytes that have come to the calls they belong to.
"""

from collections.abc import Callable

from penstock.errors import PeerError, PenstockError
from penstock.wire.frame import Request
from penstock.wire.output import Output

CALLS_MAX = 65_536
"""Most calls that wait on one connection."""
GATHER_BYTES_MAX = 64 * 1024
"""Bytes that wait at most for the end of the turn; a longer frame is not copied to join others."""
NEVER_MS = 1 << 62

_CALLS_MAX = CALLS_MAX
_GATHER_BYTES_MAX = GATHER_BYTES_MAX
_NEVER_MS = NEVER_MS
_RESPONSE = 1

_int = int  # hides annotations from the compiler, keeps them for mypy


class Call:
    """Who waits for an answer. Times are by the monotonic clock.

    `sent_ms` is when its request was written, `reads` how often the connection had brought bytes by
    then, `answered_ms` when its answer came.
    """

    def __init__(self, code: _int, timeout_ms: _int, deadline_ms: _int) -> None:
        self.code: int = code
        self.timeout_ms: int = timeout_ms
        self.deadline_ms: int = deadline_ms
        self.sent_ms: int = 0
        self.answered_ms: int = 0
        self.reads: int = 0

    def answered(self, request: Request) -> None:
        """Take the answer, in place: its bytes are gone afterwards. Raises nothing."""

    def failed(self, error: PenstockError) -> None:
        """No answer will come. Raises nothing."""


class PendingCalls:
    """What waits on one connection; `set_alarm`, `wake` and `leave` are the connection's."""

    def __init__(
        self,
        address: str,
        frame_bytes_max: _int,
        set_alarm: Callable[[int], None],
        wake: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self.address: str = address
        self.pending: dict[int, Call] = {}
        self.output: Output = Output()
        self.request: Request = Request(frame_bytes_max)
        self.reads: int = 0
        self.alarm_ms: int = NEVER_MS
        self.paused: bool = False  # the transport has enough for now
        self.awake: bool = False  # the output leaves with the end of this turn
        self.asked: bool = False  # `request` holds a request of the server's
        self._opaque: int = 0
        self._set_alarm: Callable[[int], None] = set_alarm
        self._wake: Callable[[], None] = wake
        self._leave: Callable[[], None] = leave

    def next_opaque(self) -> _int:
        """A number for a request; raises PeerError if too many wait already."""
        if len(self.pending) >= _CALLS_MAX:
            raise PeerError.over(
                f"{self.address}: calls that wait for an answer",
                figure=len(self.pending) + 1,
                limit=CALLS_MAX,
                unit="calls",
            )
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    def expect(self, call: Call) -> _int:
        """Let a call wait for its answer; gives the number that its request has to carry."""
        opaque = self.next_opaque()
        call.reads = self.reads
        self.pending[opaque] = call
        if call.deadline_ms < self.alarm_ms:
            self._set_alarm(call.deadline_ms)
        return opaque

    def push(self) -> None:
        """See to it that what is in `output` leaves with the end of this turn."""
        if self.output.length > _GATHER_BYTES_MAX:
            self._leave()
        elif not self.awake:
            self.awake = True
            self._wake()

    def take(self, at: _int, end: _int, now_ms: _int) -> _int:
        """Hand out the answers among the bytes [at, end) of the bound buffer.

        Returns where the first frame that is not all there begins; stops behind a request of the
        server's (`asked`). Raises a WireError for a frame that breaks the protocol.
        """
        request = self.request
        self.asked = False
        while True:
            length = request.read(at, end)
            if length == 0:
                return at
            at += length
            if request.flag & _RESPONSE == 0:
                self.asked = True
                return at
            call = self.pending.pop(request.opaque, None)
            if call is not None:  # else its caller has given up
                call.answered_ms = now_ms
                call.answered(request)
