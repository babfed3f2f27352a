"""Tells replicas who their master is (NOTIFY_BROKER_ROLE_CHANGED).

The controller dials the brokers. A notification that fails is repeated while the state is the
present one. After that the replica learns it when it asks: brokers do that every few seconds.
"""

from __future__ import annotations

import logging
import ssl as tls
from collections.abc import Callable

from penstock.clock import Clock, pause
from penstock.controller.broker_set import BrokerSet
from penstock.controller.controller import role_change_body, role_change_fields
from penstock.errors import PenstockError
from penstock.server.background import TaskSet
from penstock.transport.peer import Peer, Sign
from penstock.wire.codes import RequestCode, ResponseCode, response_name

log = logging.getLogger(__name__)

NOTIFY_MS = 3_000
PAUSES_MS = (100, 300, 1_000, 3_000)
"""Until the next attempts."""


class Notifications:
    """Sends notifications."""

    def __init__(
        self,
        clock: Clock,
        is_current: Callable[[BrokerSet], bool],
        *,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._clock = clock
        self._is_current = is_current
        self._sign = sign
        self._ssl = ssl
        self._tasks = TaskSet()
        self.failures = 0
        """Replicas that could not be told."""

    def notify(self, address: str, state: BrokerSet) -> None:
        """Tell a replica who is the master."""
        self._tasks.spawn(self._notify(address, state))

    async def close(self) -> None:
        await self._tasks.close()

    async def _notify(self, address: str, state: BrokerSet) -> None:
        error = await self._call(address, state)
        for pause_ms in PAUSES_MS:
            if not error:
                return
            await pause(self._clock, pause_ms)
            if not self._is_current(state):
                return
            error = await self._call(address, state)
        if error:
            self.failures += 1
            log.warning("can't notify %s of the master of %s: %s", address, state.name, error)

    async def _call(self, address: str, state: BrokerSet) -> str:
        """The error; empty if the replica has taken the notification."""
        try:
            peer = Peer(address, sign=self._sign, ssl=self._ssl, clock=self._clock)
        except ValueError as error:
            return str(error)
        try:
            answer = await peer.call(
                RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
                role_change_fields(state),
                role_change_body(state),
                timeout_ms=NOTIFY_MS,
            )
        except PenstockError as error:
            return str(error)
        finally:
            await peer.close()
        if answer.code == ResponseCode.SUCCESS:
            return ""
        return f"{response_name(answer.code)} {answer.remark or ''}"
