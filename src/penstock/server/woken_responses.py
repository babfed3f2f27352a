"""Responses to woken pulls and pops: collected by connection, and sent in one write for each."""

from penstock.broker.pop.in_place.pop_handler import SuspendedPop
from penstock.broker.pull.pull_handler import UNUSUAL, SuspendedPull
from penstock.server.pending_response import PendingResponse, ResponseConnection
from penstock.wire.output import Output

WRITE_BYTES = 256 * 1024
"""More than this is sent at once, so that a client that does not read is noticed."""
KEPT_OUTPUTS = 32
"""Empty outputs that are kept for the next responses."""


class WokenResponses:
    """Responses that are not sent yet."""

    def __init__(self) -> None:
        self._outputs: dict[ResponseConnection, Output] = {}
        self._kept: list[Output] = []

    def write(self, pending: PendingResponse, suspended: SuspendedPull | SuspendedPop) -> int:
        """Write the response to a request, as its `write` does; it is sent by `flush`.

        After an error the request is UNUSUAL: whoever then calls it meets the error again.
        """
        connection = pending.connection
        output = self._outputs.get(connection)
        if output is None:
            output = self._outputs[connection] = self._kept.pop() if self._kept else Output()
        before = output.length
        try:
            outcome = suspended.write(output, pending.encoding, pending.opaque)
        except Exception:
            output.length = min(output.length, before)  # a pop may have woken others
            return UNUSUAL
        if output.length >= WRITE_BYTES:
            del self._outputs[connection]
            connection.write(output.take())
        return outcome

    def flush(self) -> None:
        """Send all responses."""
        outputs = self._outputs
        if not outputs:
            return
        self._outputs = {}
        for connection, output in outputs.items():
            if output.length:
                connection.write(output.take())
            if len(self._kept) < KEPT_OUTPUTS and output.capacity <= WRITE_BYTES:
                self._kept.append(output)
