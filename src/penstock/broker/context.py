"""The parts of a broker, as the handlers see them. `broker.broker` builds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.broker.filter.filters import Filters
from penstock.rpc.changed_settings import ChangedSettings

if TYPE_CHECKING:
    from penstock.broker.auth.access_control import Access
    from penstock.broker.consumers.clients import Clients
    from penstock.broker.consumers.consumer_offsets import Offsets
    from penstock.broker.consumers.groups import Groups
    from penstock.broker.consumers.queue_locks import QueueLocks
    from penstock.broker.delay.delay_levels import Delay
    from penstock.broker.delay.timers import Timers
    from penstock.broker.long_polling import LongPolling
    from penstock.broker.redirect import Redirects
    from penstock.broker.rewrite import MessageRewriter
    from penstock.broker.stats import Stats
    from penstock.broker.topics import Topics
    from penstock.broker.transaction.transactions import Transactions
    from penstock.config import Live
    from penstock.rpc.answers import EffectQueue
    from penstock.rpc.persistence import Persistence
    from penstock.store.store import MessageStore


@dataclass(slots=True)
class BrokerContext:
    """Everything a family of handlers may need."""

    settings: Live  # .current: Settings; changes over the wire go through it
    store: MessageStore
    persistence: Persistence
    topics: Topics
    groups: Groups
    offsets: Offsets
    rewriter: MessageRewriter
    delay: Delay
    clients: Clients
    locks: QueueLocks
    long_polling: LongPolling
    stats: Stats
    access: Access
    effects: EffectQueue
    address: str  # the announced host:port
    started_ms: int
    changed_settings: ChangedSettings = field(default_factory=ChangedSettings)
    filters: Filters = field(default_factory=Filters)
    # These need the others; `broker.broker` sets them when those stand.
    timers: Timers = field(init=False)
    transactions: Transactions = field(init=False)
    redirects: Redirects = field(init=False)
