"""Direct sends: a producer that waits for each message sends it in the caller's thread.

A send through the loop thread costs two changes of threads. The calling thread waits anyway, so it
can write the request and read the response itself, over a connection of its own. That is done only
where it makes no other difference:

* Nothing else of the producer is in flight, so no message overtakes another. A producer that has
  sent one-way messages keeps to the loop thread: nobody knows when those arrive.
* Route and connection are known, no broker is avoided, and the first CALM_SENDS sends have shown
  that the producer is used this way.
* Nothing observes or changes the send: no batching, traces, spans, compression or TLS.

An attempt that fails is continued in the loop thread, with the same message id, timeout and
retries.
"""

from asyncio import _get_running_loop

from penstock.client.messages import Message, SendReceipt
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.sync.direct_path import DirectPath
from penstock.client.sync.in_flight_gate import InFlightGate

CALM_SENDS = 8
"""Sends of a producer through the loop thread, with nothing else in flight, before it opens
connections for direct sends: most short programs need none."""


class DirectSends:
    """Decides which sends of a synchronous producer are direct."""

    def __init__(self, client: AsyncProducer, gate: InFlightGate) -> None:
        self._client = client
        self._gate = gate
        self._calm_sends = 0
        self._allowed = True
        self._path: DirectPath | None = None

    def forbid(self) -> None:
        """Make no direct sends any more."""
        self._allowed = False

    def close(self, timeout_ms: int) -> None:
        """Wait for the direct send of another thread, and close the connections."""
        self.forbid()
        self._gate.wait_for_direct(timeout_ms / 1000)
        if self._path is not None:
            self._path.close()

    def send(
        self, message: Message, ordering_key: str | None, timeout_ms: int | None
    ) -> SendReceipt | None:
        """Send a message and return its receipt; None if it has to go through the loop thread."""
        if (
            not self._allowed
            or _get_running_loop() is not None  # a notebook's
            or not self._gate.enter_direct()
        ):
            return None
        try:
            path = self._path or self._start()
            if path is None or not self._allowed:  # closed meanwhile
                return None
            return path.send(message, ordering_key, timeout_ms)
        finally:
            self._gate.leave_direct()

    def _start(self) -> DirectPath | None:
        """Count a calm send, and make the path when there were enough."""
        self._calm_sends += 1
        if self._calm_sends <= CALM_SENDS:
            return None
        sender = self._client.direct_sender
        if sender is None:
            self.forbid()
        else:
            self._path = DirectPath(sender)
        return self._path
