"""Request-reply: answers are handed on to the client that asked (SEND_REPLY_MESSAGE).
(Contract; its owner fills it in.)"""

from penstock.broker.parts import Parts
from penstock.broker.router import Row


class Replies:
    """Hands replies on; `host` is the broker's address as messages note it."""

    def __init__(self, parts: Parts, host: bytes) -> None:
        self._parts = parts
        self._host = host

    def rows(self) -> list[Row]:
        return []
