"""What a compiled load has measured, without an object per message."""

from penstock.cli.bench.histogram import LogHistogram

_int = int  # hides annotations from the compiler, keeps them for mypy
_bool = bool


def is_stored(code: _int) -> _bool:
    """Whether a send with this response code has stored its messages: those of `SendStatus`."""
    return code == 0 or 10 <= code <= 12


class LoadRecorder:
    """Counts messages whose begin, or for received ones the arrival, is in the window.

    Times are nanoseconds of the monotonic clock. All connections of a load have the same recorder.
    """

    def __init__(self) -> None:
        # The window; empty until it is set.
        self.begin_ns: int = 0
        self.end_ns: int = 0
        self.latency: LogHistogram = LogHistogram()
        # How much later than intended requests were sent.
        self.behind: LogHistogram = LogHistogram()
        self.messages: int = 0
        self.byte_count: int = 0
        # When the last message that counts was acknowledged or received.
        self.last_ns: int = 0
        # Messages of the window by response code, if it is not SUCCESS.
        self.codes: dict[int, int] = {}
        # Since the start: sends that were acknowledged, messages that were received, and received
        # ones whose body does not match its checksum.
        self.acknowledged: int = 0
        self.received: int = 0
        self.corrupt: int = 0

    def set_window(self, begin_ns: int, end_ns: int) -> None:
        """Count from now on what is in [begin, end)."""
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.last_ns = begin_ns

    def sent(self, begin_ns: int, now_ns: int) -> None:
        """A request of an open loop was written `now`."""
        if self.begin_ns <= begin_ns < self.end_ns:
            self.behind.add(now_ns - begin_ns, 1)

    def answered(
        self, code: int, begin_ns: int, now_ns: int, messages: int, byte_count: int
    ) -> None:
        """A send of some messages was answered `now`."""
        stored = is_stored(code)
        if stored:
            self.acknowledged += messages
        if self.begin_ns <= begin_ns < self.end_ns:
            if stored:
                self.latency.add(now_ns - begin_ns, messages)
                self.messages += messages
                self.byte_count += byte_count
                if now_ns > self.last_ns:
                    self.last_ns = now_ns
            if code != 0:
                self.count_code(code, messages)

    def arrived(self, now_ns: int, messages: int, byte_count: int) -> None:
        """Messages have arrived."""
        self.received += messages
        if self.begin_ns <= now_ns < self.end_ns:
            self.messages += messages
            self.byte_count += byte_count
            self.last_ns = now_ns

    def count_code(self, code: int, messages: int) -> None:
        """Messages, or a pull, got this response code."""
        self.codes[code] = self.codes.get(code, 0) + messages
