"""Counts the messages that the callers of a synchronous producer have in flight."""

from threading import Condition


class InFlightGate:
    """Lets up to `limit` messages in, or one direct send if there is no other message."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._direct = False  # the only one is a direct send
        self._direct_sends = 0
        self._waiting = 0
        self._changed = Condition()

    def enter(self) -> None:
        """Count one more; waits while the limit is reached."""
        with self._changed:
            while self._count >= self._limit:
                self._wait(None)
            self._count += 1

    def leave(self) -> None:
        """Count one less; for the end of an `enter`."""
        with self._changed:
            self._leave()

    def enter_direct(self) -> bool:
        """Count a direct send; False if any other message is in flight."""
        with self._changed:
            if self._count:
                return False
            self._count, self._direct = 1, True
            self._direct_sends += 1
            return True

    def leave_direct(self) -> None:
        """The direct send is over."""
        with self._changed:
            self._direct = False
            self._leave()

    def wait_for_direct(self, timeout_s: float | None = None) -> None:
        """Return when the direct send that is in flight now is over, or after the timeout."""
        with self._changed:
            number = self._direct_sends
            while self._direct and self._direct_sends == number:
                if not self._wait(timeout_s):
                    return

    def _leave(self) -> None:
        self._count -= 1
        if self._waiting:
            self._changed.notify_all()

    def _wait(self, timeout_s: float | None) -> bool:
        self._waiting += 1
        try:
            return self._changed.wait(timeout_s)
        finally:
            self._waiting -= 1
