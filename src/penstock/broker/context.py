"""What the handlers of a broker share. `broker.broker` builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.broker.auth.access_control import AccessControl
    from penstock.broker.auto_creations import AutoCreations
    from penstock.broker.consumers.clients import Clients
    from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
    from penstock.broker.consumers.groups import Groups
    from penstock.broker.consumers.queue_locks import QueueLocks
    from penstock.broker.delay.delay_levels import Delay
    from penstock.broker.filter.filters import Filters
    from penstock.broker.long_polling import LongPolling
    from penstock.broker.replicas.replica_role import ReplicaRole
    from penstock.broker.rewrite import MessageRewriter
    from penstock.broker.stats import Stats
    from penstock.broker.topics import Topics
    from penstock.config import LiveSettings
    from penstock.rpc.answers import EffectQueue
    from penstock.rpc.changed_settings import ChangedSettings
    from penstock.rpc.persistence import Persistence
    from penstock.store.store import MessageStore


@dataclass(frozen=True, slots=True)
class BrokerContext:
    """The store, the tables and the services that do not need each other's handlers."""

    role: ReplicaRole
    settings: LiveSettings  # .current: Settings; changes over the wire go through it
    changed_settings: ChangedSettings
    store: MessageStore
    persistence: Persistence
    topics: Topics
    groups: Groups
    auto_creations: AutoCreations
    offsets: ConsumerOffsets
    clients: Clients
    locks: QueueLocks
    access: AccessControl
    filters: Filters
    rewriter: MessageRewriter
    delay: Delay
    long_polling: LongPolling
    stats: Stats
    effects: EffectQueue
    address: str  # the announced host:port
    started_ms: int
