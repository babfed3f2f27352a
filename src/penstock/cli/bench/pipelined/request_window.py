"""The requests of one connection that are in flight: frames out, responses in.

A request has a slot while it is in flight; its opaque is OPAQUE_FIRST + slot. A response is matched
to its slot, whatever the order of responses. Both directions work in place: a frame is a copy of a
template with other numbers, and a response is read in the buffer that it was received in.

Cost model: compiled, a request takes about 30 ns, and a response 110 ns with a binary header or
380 ns with a JSON header. No object is made for either.
"""

from array import array

from penstock.cli.bench.pipelined.frame_templates import OPAQUE_FIRST, ROW, FrameTemplates
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.errors import FrameError
from penstock.wire import octets
from penstock.wire.frame import Request
from penstock.wire.output import Output

_OPAQUE_FIRST = OPAQUE_FIRST
_ROW = ROW
_RESPONSE = 1

_int = int  # hides annotations from the compiler, keeps them for mypy


class RequestWindow:
    """At most `size` requests in flight. Subclasses decide what is sent, and read the responses."""

    def __init__(self, templates: FrameTemplates, size: int, recorder: LoadRecorder) -> None:
        self.recorder: LoadRecorder = recorder
        # Frames that are not sent yet; the connection takes them.
        self.output: Output = Output(64 * 1024)
        # The response that was read last, valid until the next one.
        self.request: Request = Request()
        self.size: int = size
        self.in_flight: int = 0
        # Slots of refused requests, which stay empty until `release_withheld`: a load must not
        # repeat requests that fail without a pause.
        self.withheld: int = 0
        # Templates: their bytes, which are patched; see FrameTemplates for the rows.
        self._data: memoryview = memoryview(bytearray(templates.data))
        self._rows: memoryview = memoryview(array("i", templates.rows))
        self._is_json: bool = templates.is_json
        self._number_width: int = templates.number_width
        # By slot: when its request began (-1: it is empty), and the template of its request.
        self._begins: memoryview = memoryview(array("q", [-1] * size))
        self._templates: memoryview = memoryview(array("i", [0] * size))
        # A stack of empty slots at its begin, and one of withheld slots at its end.
        self._free: memoryview = memoryview(array("i", range(size)))
        self._free_count: int = size

    def bind(self, buffer: memoryview) -> None:
        """Set the writable buffer that responses are received in."""
        self.request.bind(buffer)

    def fill(self, now_ns: int, now_ms: int) -> None:
        """Write what may be sent now into the output; `now_ms` is the time of day."""
        raise NotImplementedError

    def missing(self) -> int:
        """How many more bytes the incomplete response needs at least."""
        return self.request.missing

    def release_withheld(self) -> None:
        """Use the slots of refused requests again."""
        while self.withheld > 0:
            self.withheld -= 1
            self._free[self._free_count] = self._free[self.size - 1 - self.withheld]
            self._free_count += 1

    def take(self, at: int, end: int, now_ns: int) -> int:
        """Take the responses in the bytes [at, end) of the bound buffer, received `now`.

        Returns where the first incomplete one begins. Raises a WireError for a frame that violates
        the protocol. Requests of the server are ignored.
        """
        request = self.request
        while at < end:
            length = request.read(at, end)
            if length == 0:
                break
            at += length
            if request.flag & _RESPONSE != 0:
                self._answered(self._slot_of(request.opaque), now_ns)
        return at

    def _slot_of(self, opaque: int) -> int:
        """The slot of a response."""
        slot = opaque - _OPAQUE_FIRST
        if slot < 0 or slot >= self.size or self._begins[slot] < 0:
            raise FrameError(f"a response has the opaque {opaque}, which no request in flight has")
        return slot

    def _answered(self, slot: int, now_ns: int) -> int:
        """Take the response in `request` to the request in this slot, and release the slot."""
        raise NotImplementedError

    def _release(self, slot: int, refused: bool) -> None:
        """Its request has its response; withhold the slot if it was refused."""
        self._begins[slot] = -1
        self.in_flight -= 1
        if refused:
            self._free[self.size - 1 - self.withheld] = slot
            self.withheld += 1
        else:
            self._free[self._free_count] = slot
            self._free_count += 1

    def _put_number(self, template: int, value: int) -> None:
        """Set the number of a template, which later frames of it contain."""
        at = self._rows[template * _ROW] + self._rows[template * _ROW + 3]
        place = at + self._number_width - 1
        while place >= at:
            self._data[place] = 48 + value % 10
            value //= 10
            place -= 1

    def _put_frame(self, template: int, begin_ns: int) -> int:
        """Write the request of a template into an empty slot; returns where its frame begins."""
        self._free_count -= 1
        slot = self._free[self._free_count]
        self._begins[slot] = begin_ns
        self._templates[slot] = template
        self.in_flight += 1
        row = template * _ROW
        length = self._rows[row + 1]
        output = self.output
        output.reserve(length)
        start = output.length
        octets.copy(output.view, start, self._data, self._rows[row], length)
        at = start + self._rows[row + 2]
        if self._is_json:
            octets.put_decimal(output.view, at, _OPAQUE_FIRST + slot)
        else:
            octets.put_i32(output.view, at, _OPAQUE_FIRST + slot)
        output.length = start + length
        return start
