"""The parts of a broker, as the handlers see them. `broker.broker` builds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.broker.changes import ChangedSettings
from penstock.broker.filter import Filters

if TYPE_CHECKING:
    from penstock.broker.access import Access
    from penstock.broker.answers import Outbox
    from penstock.broker.clients import Clients
    from penstock.broker.copies import Copies
    from penstock.broker.delay import Delay
    from penstock.broker.detours import Detours
    from penstock.broker.groups import Groups
    from penstock.broker.longpoll import Holds
    from penstock.broker.offsets import Offsets
    from penstock.broker.ordering import QueueLocks
    from penstock.broker.persistence import Persistence
    from penstock.broker.stats import Stats
    from penstock.broker.timer import Timers
    from penstock.broker.topics import Topics
    from penstock.broker.transaction import Transactions
    from penstock.config import Live
    from penstock.store.store import MessageStore


@dataclass(slots=True)
class Parts:
    """Everything a family of handlers may need."""

    settings: Live  # .current: Settings; changes over the wire go through it
    store: MessageStore
    persistence: Persistence
    topics: Topics
    groups: Groups
    offsets: Offsets
    copies: Copies
    delay: Delay
    clients: Clients
    locks: QueueLocks
    holds: Holds
    stats: Stats
    access: Access
    outbox: Outbox
    address: str  # the announced host:port
    started_ms: int
    changed_settings: ChangedSettings = field(default_factory=ChangedSettings)
    filters: Filters = field(default_factory=Filters)
    # These need the others; `broker.broker` sets them when those stand.
    timers: Timers = field(init=False)
    transactions: Transactions = field(init=False)
    detours: Detours = field(init=False)
