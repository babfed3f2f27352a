"""Sends of one connection: to its queues in turn, in a closed or an open loop."""

from array import array

from penstock.cli.bench.pipelined.frame_templates import ROW, FrameTemplates
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder, is_stored
from penstock.cli.bench.pipelined.request_window import RequestWindow
from penstock.wire import octets

UNLIMITED = -1
_ROW = ROW
NEVER_NS = (1 << 63) - 1
_NEVER_NS = NEVER_NS


class SendWindow(RequestWindow):
    """Sends requests of `ids` messages with bodies of `body_bytes` each."""

    def __init__(
        self, templates: FrameTemplates, size: int, recorder: LoadRecorder, body_bytes: int
    ) -> None:
        RequestWindow.__init__(self, templates, size, recorder)
        # Nothing is sent from this time on.
        self.stop_ns: int = 0
        # Requests that are left to send, or UNLIMITED.
        self.left: int = UNLIMITED
        # Open loop: request `_number` is due at `_first_ns` + `_number` * `_interval_ns`.
        self._first_ns: float = 0.0
        self._interval_ns: float = 0.0
        self._number: int = 0
        self._batch: int = templates.ids
        self._bytes: int = templates.ids * body_bytes
        self._id_places: memoryview = memoryview(array("i", templates.id_places))
        self._count: int = templates.count
        self._next: int = 0
        self._id: int = 0
        self._born_ms: int = -1

    def schedule(self, first_ns: float, interval_ns: float) -> None:
        """Send requests at these times instead of after the response to an earlier one."""
        self._first_ns = first_ns
        self._interval_ns = interval_ns

    def due_ns(self) -> int:
        """When the next request of an open loop is due; NEVER_NS if there is none, or no slot."""
        if self._free_count == 0 or self.left == 0:
            return _NEVER_NS
        due_ns = self._due_ns()
        return due_ns if due_ns < self.stop_ns else _NEVER_NS

    def fill(self, now_ns: int, now_ms: int) -> None:
        """Send whatever may be sent now: in a closed loop, a request in each empty slot."""
        if now_ms != self._born_ms:
            self._set_born(now_ms)
        if self._interval_ns > 0:
            while self._free_count > 0 and self.left != 0:
                due_ns = self._due_ns()
                if due_ns > now_ns or due_ns >= self.stop_ns:
                    break
                self._number += 1
                self.recorder.sent(due_ns, now_ns)
                self._send(due_ns)
        elif now_ns < self.stop_ns:
            while self._free_count > 0 and self.left != 0:
                self._send(now_ns)

    def _due_ns(self) -> int:
        return int(self._first_ns + self._number * self._interval_ns)

    def _set_born(self, now_ms: int) -> None:
        self._born_ms = now_ms
        template = 0
        while template < self._count:
            self._put_number(template, now_ms)
            template += 1

    def _send(self, begin_ns: int) -> None:
        template = self._next
        self._next = template + 1 if template + 1 < self._count else 0
        if self.left > 0:
            self.left -= 1
        start = self._put_frame(template, begin_ns)
        place = self._rows[template * _ROW + 4]
        end = place + self._batch
        view = self.output.view
        while place < end:
            octets.put_hex_i64(view, start + self._id_places[place], self._id)
            self._id += 1
            place += 1

    def _answered(self, slot: int, now_ns: int) -> int:
        code = self.request.code
        begin_ns = self._begins[slot]
        self._release(slot, not is_stored(code))
        self.recorder.answered(code, begin_ns, now_ns, self._batch, self._bytes)
        return 0
