"""The path of a direct send: encodes it, and exchanges request and response in the same thread."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import cast

from penstock.client.messages import Message, SendReceipt, SendStatus
from penstock.client.producer.broker_latency import SLOW_MS
from penstock.client.producer.fast_path import FastPath
from penstock.client.producer.publish_info import target_selector
from penstock.client.producer.send_codec import (
    INLINE_BODY_BYTES_MAX,
    PendingSend,
    SendResult,
    SendTarget,
    put_send,
)
from penstock.client.producer.sending import Sender
from penstock.client.sync.loop_thread import loop_thread
from penstock.errors import PenstockError
from penstock.transport.blocking_connection import BlockingConnection
from penstock.transport.peer_connection import PeerConnection

IDLE_MS = 30_000
"""Connections that were not used for this time are opened again: brokers close idle ones."""
CONNECT_MS = 500
"""A broker that does not accept another connection in this time gets none for direct sends."""


class DirectPath(FastPath):
    """Sends messages of one producer; one thread at a time may use it."""

    def __init__(self, sender: Sender) -> None:
        FastPath.__init__(self, sender.clock, sender.in_flight, sender.faults, sender.timeout_ms)
        self._sender = sender
        self._connections: dict[str, _BrokerConnection] = {}  # by broker name
        self._refused: PeerConnection | None = None  # no connection could be opened besides it
        self._receipt: SendResult | None = None
        self._error: PenstockError | None = None
        self.packer = sender.make_packer()
        self.create_future = cast("Callable[[], asyncio.Future[SendResult]]", _no_future)
        self.pid = os.getpid()
        self.open = True

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()

    def send(
        self, message: Message, ordering_key: str | None, timeout_ms: int | None
    ) -> SendReceipt | None:
        """Send a message and return its receipt; None if it has to go through the loop thread."""
        sender, body, topic = self._sender, message.body, message.topic
        info = sender.publish_infos.get(topic)
        packer = self.packer
        assert packer is not None
        if (
            info is None
            or topic in sender.deferred_counts
            or sender.faulty_brokers
            or type(body) is not bytes
            or not 0 < len(body) < packer.plain_bytes
            or len(body) > INLINE_BODY_BYTES_MAX
            or (timeout_ms is not None and timeout_ms <= 0)
        ):
            return None
        select = target_selector(message, None, ordering_key, None)
        target = info.next(self.faults, None) if select is None else select(info)
        connection = self._connection(target)
        if connection is None:
            if select is None:
                info.position -= 1  # the turn was not used
            return None
        pending = self.make_pending(message, ordering_key, timeout_ms, False)
        self._exchange(connection, pending, target)
        receipt, error = self._receipt, self._error
        self._receipt = self._error = None
        if error is not None:
            return loop_thread().run(_continue_failed, sender, pending, error)
        return cast(SendReceipt, receipt)

    def _connection(self, target: SendTarget) -> "_BrokerConnection | None":
        """The connection to the broker of a queue, opened if necessary and possible."""
        peer = target.peer
        beside = None if peer is None else peer.connection
        if peer is None or beside is None:
            return None
        now_ms = self.clock.monotonic_ms()
        connection = self._connections.get(target.broker_name)
        if connection is not None:
            if connection.beside is beside and now_ms - connection.used_ms < IDLE_MS:
                connection.used_ms = now_ms
                return connection
            self._drop(target)
        if beside.encrypted or beside.remote is None or beside is self._refused:
            return None
        try:
            connection = _BrokerConnection(beside, beside.remote, peer.address, now_ms)
        except OSError:
            self._refused = beside
            return None
        self._connections[target.broker_name] = connection
        return connection

    def _drop(self, target: SendTarget) -> None:
        self._connections.pop(target.broker_name).close()

    def _exchange(
        self, connection: "_BrokerConnection", pending: PendingSend, target: SendTarget
    ) -> None:
        """Make one attempt; the outcome is in `_receipt` or `_error`."""
        pending.target = target
        pending.sent_ms = pending.deadline_ms - pending.timeout_ms
        opaque = connection.next_opaque()
        if target.signs:
            assert target.peer is not None
            fields = pending.fields(target)
            frame = target.peer.encode(pending.code, fields, pending.body, opaque=opaque, flag=0)
            connection.output.append(frame)
        else:
            put_send(connection.output, pending, target, opaque, 0)
        try:
            response = connection.exchange(opaque, pending.code, pending.timeout_ms)
        except PenstockError as error:
            self._drop(target)
            self._error = error
        except BaseException:
            self._drop(target)
            raise
        else:
            pending.answered_ms = self.clock.monotonic_ms()
            pending.answered(response)

    def send_succeeded(self, pending: PendingSend, result: SendResult, status: SendStatus) -> None:
        self._receipt = result
        latency_ms = pending.answered_ms - pending.sent_ms
        if latency_ms >= SLOW_MS:
            loop_thread().call_soon(partial(self._sender.report_latency, pending, latency_ms))

    def send_failed(self, pending: PendingSend, error: PenstockError) -> None:
        self._error = error


class _BrokerConnection(BlockingConnection):
    """A connection to a broker besides the loop thread's, and as long as there is that one."""

    def __init__(
        self, beside: PeerConnection, remote: tuple[str, int], address: str, now_ms: int
    ) -> None:
        super().__init__(address, *remote, connect_ms=CONNECT_MS)
        self.beside = beside
        self.used_ms = now_ms


def _no_future() -> None:
    """A direct send has a future only if the loop thread continues it."""


def _continue_failed(
    sender: Sender, pending: PendingSend, error: PenstockError
) -> "asyncio.Future[SendReceipt]":
    """Continue a send whose first attempt has failed; called in the loop."""
    sender.check_usable()
    future: asyncio.Future[SendReceipt] = asyncio.get_running_loop().create_future()
    pending.owner = sender
    pending.future = cast("asyncio.Future[SendResult]", future)
    pending.flush_group = sender.in_flight.add(len(pending.body))
    sender.send_failed(pending, error)
    return future
