"""What only a master has: the handlers and services that write to the log.

A slave does not create them, so nothing is delivered, checked back or revived there. A broker that
becomes a master creates them, and they find their state in the log and in the tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from penstock.broker.admin.replica_tables import ReplicaTables
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_redirect import DelayRedirect
from penstock.broker.delay.recall import Recall
from penstock.broker.delay.timers import OldTimer, Timers
from penstock.broker.pop.pop_message import Pop
from penstock.broker.redirect import Redirects
from penstock.broker.request_reply import Replies
from penstock.broker.retry.consumer_send_back import ConsumerSendBack
from penstock.broker.retry.dead_letter_queues import DeadLetterQueues
from penstock.broker.send import SendHandler
from penstock.broker.transaction.transactions import Transactions
from penstock.rpc.answers import PersistentTable
from penstock.wire.message import encode_host, encode_properties
from penstock.wire.message_ids import UniqueIds

if TYPE_CHECKING:
    from penstock.config import BrokerConfig, Settings
    from penstock.rpc.router import InPlaceRow, Row


class HandlerFamily(Protocol):
    """Handlers of related requests."""

    def rows(self) -> Iterable[Row | InPlaceRow]: ...


class TimedService(Protocol):
    """A service that stores messages for later."""

    def tables(self) -> tuple[PersistentTable, ...]: ...

    def due(self) -> int:
        """When `tick` has something to do."""

    def tick(self, now_ms: int) -> None: ...

    def finish(self, now_ms: int) -> None:
        """Called before a clean stop."""

    def pinned_from(self) -> int | None:
        """Log offset of the first message that is still needed; None if none is."""


class MasterServices:
    """The handlers and services of a master; messages contain the address `host`."""

    def __init__(
        self,
        context: BrokerContext,
        host: str,
        now_ms: int,
        *,
        old_timer: OldTimer | None = None,
    ) -> None:
        """`old_timer` is that of the master before this one."""
        settings, store = context.settings, context.store
        store_host = encode_host(host)
        self.dead_letters = DeadLetterQueues(context)
        self._send_back = ConsumerSendBack(context, self.dead_letters, store_host)
        self.timers = Timers(
            settings,
            store,
            context.persistence,
            context.topics,
            context.rewriter,
            context.effects,
            now_ms=now_ms,
            old=old_timer,
        )
        delayed = DelayRedirect(context.delay, self.timers)
        self.transactions = Transactions(context, store_host, delayed, now_ms)
        self.pop = Pop(context, store_host)
        self.replies = Replies(context, store_host)
        self.send = SendHandler(
            store.writer,
            context.topics,
            Redirects(
                self.dead_letters,
                self.transactions,
                delayed,
                segment_bytes=store.log.segments.segment_bytes,
            ),
            store_host,
            unique_ids=UniqueIds(store_host[:-4], pid=os.getpid(), loader=now_ms & 0x7FFFFFFF),
            region=settings.current.broker.region.encode(),
        )
        recall = Recall(settings, store, context.topics, self.timers, context.address)
        self.families: tuple[HandlerFamily, ...] = (
            self.send,
            self._send_back,
            recall,
            self.transactions,
            self.pop,
            self.replies,
            ReplicaTables(context, self.pop.order),
        )
        self.timed: tuple[TimedService, ...] = (
            context.delay,
            self.timers,
            self.transactions,
            self.pop,
        )

    def configure(self, settings: Settings) -> None:
        """Apply live settings."""
        self.send.configure(
            _extra_properties(settings.broker),
            settings.store.body_bytes_max,
            trace_on=settings.broker.trace_on,
        )


def _extra_properties(config: BrokerConfig) -> bytes:
    """The properties that the broker adds to each message."""
    return encode_properties(
        {
            "MSG_REGION": config.region,
            "TRACE_ON": "true" if config.trace_on else "false",
            "CLUSTER": config.cluster,
        }
    )
