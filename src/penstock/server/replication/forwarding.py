"""Has requests of clients answered by the master, at a slave.

The clients send to this broker because it was the master when they last asked for the route. A
request waits here until the new master is known and accepts it: clients would try again at once,
and give up. If its answer is lost, the client has to decide whether to repeat it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from penstock.broker.replicas.replica_role import FORWARD_REMARK, ReplicaRole
from penstock.clock import pause
from penstock.errors import PeerError, PeerUnreachable
from penstock.rpc.answers import Reply
from penstock.server.background import TaskSet
from penstock.transport.peer import Peer
from penstock.wire.codes import ResponseCode

if TYPE_CHECKING:
    import ssl as tls

    from penstock.clock import Clock
    from penstock.rpc.command import Command

log = logging.getLogger(__name__)

FORWARD_MS = 2_500
"""How long a request waits for its answer. RocketMQ's clients wait for 3 s."""
RETRY_MS = 20
BYTES_MAX = 64 * 1024 * 1024
"""Bodies of requests that wait at the same time."""


class Forwarding:
    """The requests that a slave sends on to its master."""

    def __init__(self, role: ReplicaRole, clock: Clock, ssl: tls.SSLContext | None) -> None:
        self._role = role
        self._clock = clock
        self._ssl = ssl
        self._peer: Peer | None = None
        self._waiting_bytes = 0
        self._tasks = TaskSet()
        self.count = 0
        """Requests that were sent on."""

    def forward(self, command: Command) -> asyncio.Task[Reply | None]:
        """Begin to have a request answered; raises NotMaster if too many wait. The result is None
        if the request was sent to the master, and its response is lost."""
        if self._waiting_bytes + len(command.body) > BYTES_MAX:
            raise self._role.refusal("this broker is a slave, and too many requests wait for it")
        self._waiting_bytes += len(command.body)  # now: the task begins later, others come before
        task = self._tasks.spawn(self._answer(command))
        task.add_done_callback(lambda done: self._answered(command))
        return task

    def _answered(self, command: Command) -> None:
        self._waiting_bytes -= len(command.body)

    async def close(self) -> None:
        await self._tasks.close()
        if self._peer is not None:
            await self._peer.close()

    async def _answer(self, command: Command) -> Reply | None:
        try:
            return await self._ask_master(command)
        except asyncio.CancelledError:
            return None  # the role changes; the request may have been sent

    async def _ask_master(self, command: Command) -> Reply | None:
        deadline_ms = self._clock.monotonic_ms() + FORWARD_MS
        busy: Reply | None = None
        while (left_ms := deadline_ms - self._clock.monotonic_ms()) > 0:
            if address := self._role.master_address:
                try:
                    reply = await self._call(await self._connected_to(address), command, left_ms)
                except PeerUnreachable:
                    pass  # it was not sent: the master may be starting, or another one elected
                except PeerError as error:
                    log.info("the response to a forwarded request is lost: %s", error)
                    return None
                else:
                    if reply.code != ResponseCode.SYSTEM_BUSY:
                        return reply
                    busy = reply  # nothing is stored: a new master has no replicas for a moment
            await pause(self._clock, RETRY_MS)
        if busy is not None:
            return busy
        raise self._role.refusal(f"no master was elected within {FORWARD_MS} ms")

    async def _call(self, peer: Peer, command: Command, timeout_ms: int) -> Reply:
        response = await peer.call(
            command.code,
            command.ext,
            command.body,
            timeout_ms=timeout_ms,
            remark=FORWARD_REMARK,
        )
        if self.count == 0:
            log.info("clients do not know the new master yet: forwarding their requests to it")
        self.count += 1
        return Reply(response.code, response.ext, response.body, response.remark)

    async def _connected_to(self, address: str) -> Peer:
        peer = self._peer
        if peer is None or peer.address != address:
            self._peer = Peer(address, ssl=self._ssl, clock=self._clock)
            if peer is not None:
                await peer.close()
        assert self._peer is not None
        return self._peer
