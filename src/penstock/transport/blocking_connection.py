"""A connection for calls of one thread at a time, without an event loop.

The caller writes a request into `output`, and `exchange` sends it and waits for the response in the
same thread. After an error the connection is closed: a late response would be taken for the next
one. Requests of the server are not served; servers send them only to registered connections.
"""

import socket
from time import monotonic

from penstock.errors import PeerLost, PeerTimeout, WireError
from penstock.wire.fields import FLAG_RESPONSE
from penstock.wire.frame import Request
from penstock.wire.output import Output

_BUFFER_BYTES = 16 * 1024
_OPAQUE_MAX = 0x7FFFFFFF


class BlockingConnection:
    """One TCP connection to a server."""

    def __init__(self, address: str, host: str, port: int, *, connect_ms: int) -> None:
        """Connect to a numeric host; raises OSError. `address` is the one for error messages."""
        self.output = Output(_BUFFER_BYTES)
        self._address = address
        self._socket = socket.create_connection((host, port), connect_ms / 1000)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timeout_ms = connect_ms
        self._response = Request()
        self._bind(_BUFFER_BYTES)
        self._opaque = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_socket"):  # it was connected
            self._socket.close()

    def next_opaque(self) -> int:
        """A number for the next request."""
        self._opaque = (self._opaque + 1) & _OPAQUE_MAX
        return self._opaque

    def exchange(self, opaque: int, code: int, timeout_ms: int) -> Request:
        """Send the output and wait for the response with this opaque, which is valid until the next
        call. Raises PeerTimeout or PeerLost."""
        try:
            if timeout_ms != self._timeout_ms:
                self._socket.settimeout(timeout_ms / 1000)
                self._timeout_ms = timeout_ms
            self._socket.sendall(self.output.take())
            self._receive(opaque, timeout_ms)
        except TimeoutError:
            self.close()
            message = f"no response to request {code} within {timeout_ms} ms"
            raise PeerTimeout(message, address=self._address) from None
        except OSError as error:
            self.close()
            raise PeerLost(f"the connection failed: {error}", address=self._address) from None
        except WireError as error:
            self.close()
            message = f"the server sent an invalid frame: {error}"
            raise PeerLost(message, address=self._address) from None
        except BaseException:  # an interrupt of the caller
            self.close()
            raise
        return self._response

    def _receive(self, opaque: int, timeout_ms: int) -> None:
        """Read until the response with this opaque is in `_response`."""
        receive, response = self._socket.recv_into, self._response
        late = monotonic() + timeout_ms / 1000
        end = 0
        while True:
            count = receive(self._view if end == 0 else self._view[end:])
            if count == 0:
                raise PeerLost("the server closed the connection", address=self._address)
            end += count
            while (length := response.read(0, end)) > 0:
                if response.opaque == opaque and response.flag & FLAG_RESPONSE:
                    return
                self._view[: end - length] = bytes(self._view[length:end])
                end -= length
            self._make_space(end)
            if monotonic() >= late:  # the socket's timeout is that of one read
                raise TimeoutError

    def _make_space(self, end: int) -> None:
        """Make space for the rest of the first frame."""
        if end + self._response.missing > len(self._view):
            begun = bytes(self._view[:end])
            self._bind(end + self._response.missing)
            self._view[:end] = begun

    def _bind(self, size: int) -> None:
        self._view = memoryview(bytearray(size))
        self._response.bind(self._view)
