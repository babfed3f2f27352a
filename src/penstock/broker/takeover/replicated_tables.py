"""The tables of a slave: they become equal to those of its master.

A table gets the master's version too, so that equal versions mean equal tables. Only entries that
differ are changed. The methods that may take long are iterators, so that the caller can do
something else after each step; the version is set by the last step.

A topic that the master no longer has is removed from the table at once. Its queues are removed
later, when the slave's log reaches the end that the master's log had when the topic was missing:
messages of the deleted topic may still arrive until then. They are kept if the newest message of a
queue is not older than the last request for the topics, because it may belong to a new topic of the
same name; the next round decides again.

**After a promotion.** The new master continues from the log and these tables:

| | Continues at | Repeats at most |
|---|---|---|
| consumers | the last commit before the tables were copied, or the last one at the slave | what was consumed since: a few seconds |
| delay levels, timer messages | the first message whose delivery is not in the log | nothing, if the messages have unique ids and were delivered after `deliveredFrom`; otherwise what was delivered in the last seconds |
| transactions | the log: op messages and committed messages are there | nothing |
| POP | the log: checkpoints and acks are there, and the offsets are replayed from them | pops that were not replicated yet: their responses do not wait for that |
| ordered POP | the copied open pops and the log | nothing |

The timer reads its whole queue again before it delivers the next message.
"""  # noqa: E501

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import ClassVar, Final

import msgspec

from penstock.broker.auth.users import AccessFile
from penstock.broker.consumers.assignment import RequestModes
from penstock.broker.context import BrokerContext
from penstock.broker.pop.ordered_pop import OrderedPops
from penstock.broker.replicas.replica_state import ReplicaState
from penstock.errors import StoreError
from penstock.rpc.answers import PersistentTable, PersistSoon, RegisterSoon
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.bodies.client_bodies import DataVersion, SubscriptionGroupConfig, TopicConfig
from penstock.wire.bodies.table_bodies import (
    ConsumerOffsetSerializeWrapper,
    DelayOffsetSerializeWrapper,
    MessageRequestModeSerializeWrapper,
    TimerCheckpoint,
)
from penstock.wire.codes import is_system_topic

log = logging.getLogger(__name__)

OFFSETS_PER_STEP: Final = 200
"""Groups on topics whose offsets one step takes over."""
LISTED_MAX: Final = 5
"""Names in one line of the log."""


class CopiedFile:
    """The file of a table that a slave does not use itself."""

    FILE: ClassVar[str] = OrderedPops.FILE

    def __init__(self) -> None:
        self.dirty = False
        self._content = b""

    def replace(self, content: bytes) -> bool:
        """Set the content; whether it differs."""
        if content == self._content:
            return False
        self._content, self.dirty = content, True
        return True

    def snapshot(self) -> bytes:
        self.dirty = False
        return self._content


class ReplicatedTables:
    """Makes the tables of a slave equal to those of its master."""

    def __init__(self, context: BrokerContext, modes: RequestModes, state: ReplicaState) -> None:
        self._context = context
        self._modes = modes
        self._state = state
        self._ordered_pops = CopiedFile()
        self._deleted: dict[str, int] = {}
        """Deleted topics whose queues are still here: the end of the master's log."""
        state.update()
        self._commits = context.role.commits
        self._commits.update(state.commits())
        context.store.on_retention(self._kept_from, unless_full=True)
        context.persistence.before(context.offsets.table.FILE, self._before_offsets_are_saved)

    def tables(self) -> tuple[PersistentTable, ...]:
        """The tables that only a slave has."""
        return (self._ordered_pops, self._state)

    def _before_offsets_are_saved(self) -> Callable[[], None] | None:
        """Ordered pops never lag behind the offsets, nor do the commits that the master lacks."""
        self._state.note_commits(self._commits)
        save = self._context.persistence.save
        saves = [save(table) for table in self.tables() if table.dirty]

        def save_all() -> None:
            for write in saves:
                write()

        return save_all if saves else None

    def _persist(self, *tables: PersistentTable) -> None:
        for table in tables:
            if table.dirty:
                self._context.effects.put(PersistSoon(table))

    # --- the log

    def master_log_begins(self, offset: int) -> None:
        """The master has deleted its log before this offset."""
        self._state.update(master_begin=offset)
        self._persist(self._state)

    def _kept_from(self) -> int | None:
        """The slave keeps what its master keeps: only the master knows which messages delays,
        timers, transactions and POP still need."""
        begin = self._state.content.master_begin
        return begin if begin >= 0 else None

    # --- topics

    def replace_topics(
        self, topics: Mapping[str, TopicConfig], version: DataVersion, now_ms: int
    ) -> Iterator[None]:
        """Take over the topics of the master."""
        table = self._context.topics.table
        gone = [name for name in table.topics if name not in topics]
        lost = version.rank() < table.version.rank()
        if lost and gone:
            log.warning(
                "the master's table of topics is older than its copy here: %d topics are missing "
                "there, and their queues are kept",
                len(gone),
            )
        for name in gone:
            table.remove(name, now_ms)
            if not lost:
                self._deleted[name] = -1
            yield
        changed = 0
        for name, config in topics.items():
            if config.topic_name != name:
                config = msgspec.structs.replace(config, topic_name=name)
            if table.get(name) != config:
                table.put(config, now_ms)
                changed += 1
                yield
        table.version = version
        table.dirty = True
        _log_changes("topics", changed, gone)
        self._persist(table)
        self._context.effects.put(RegisterSoon())

    def topics_known(self, log_begin: int, master_end: int) -> None:
        """The topics are those of a time when this log reached `log_begin` at least, and the
        master's log at most `master_end`."""
        for name, end in self._deleted.items():
            if end < 0:
                self._deleted[name] = master_end
        self._state.update(topics_to=log_begin)
        self._persist(self._state)

    def remove_queues(self, known_to: int) -> Iterator[None]:
        """Remove the queues of deleted topics, if their last messages have arrived. The topics are
        known up to the log offset `known_to`."""
        context = self._context
        store, found = context.store, False
        for name, end in list(self._deleted.items()):
            if context.topics.get(name) is not None or is_system_topic(name):
                del self._deleted[name]
                continue
            if not 0 <= end <= known_to:
                continue
            if any(_newest(queue) >= known_to for queue in store.queues.of(name.encode())):
                continue
            del self._deleted[name]
            try:
                for queue in store.remove_queues(name.encode()):
                    found = True
                    context.long_polling.wake_queue(queue)
                    yield
            except StoreError as error:
                log.warning("the queues of the deleted topic %s are kept: %s", name, error)
        if found:
            store.disk.submit(store.finish_removal)

    # --- groups and modes

    def replace_groups(
        self,
        groups: Mapping[str, SubscriptionGroupConfig],
        forbidden: Mapping[str, Mapping[str, int]],
        version: DataVersion,
        now_ms: int,
    ) -> Iterator[None]:
        """Take over the groups of the master, and the topics that they may not read."""
        table = self._context.groups.table
        gone = [name for name in table.groups if name not in groups]
        for name in gone:
            table.remove(name, now_ms)
            yield
        changed = 0
        for name, config in groups.items():
            if config.group_name != name:
                config = msgspec.structs.replace(config, group_name=name)
            if table.get(name) != config:
                table.put(config, now_ms)
                changed += 1
                yield
        own = table.wrapper().forbidden_table
        pairs = [(group, topic) for group, topics in own.items() for topic in topics]
        pairs += [(group, topic) for group, topics in forbidden.items() for topic in topics]
        for group, topic in dict.fromkeys(pairs):
            bits = max(forbidden.get(group, {}).get(topic, 0), 0)
            if bits != table.forbidden(group, topic):
                table.forbid(group, topic, bits, now_ms)
                yield
        table.version = version
        table.dirty = True
        _log_changes("groups", changed, gone)
        self._persist(table)

    def replace_modes(self, wrapper: MessageRequestModeSerializeWrapper) -> None:
        """Take over the request modes of the master."""
        if self._modes.replace(wrapper):
            self._persist(self._modes)

    # --- offsets

    def replace_offsets(
        self, wrapper: ConsumerOffsetSerializeWrapper, now_ms: int
    ) -> Iterator[None]:
        """Take over the consumer offsets of the master, smaller ones too."""
        table = self._context.offsets.table
        if wrapper == table.wrapper():
            return
        wanted = wrapper.offset_table
        for key in [key for key in table.wrapper().offset_table if key not in wanted]:
            topic, _, group = key.rpartition("@")
            table.remove(topic, group, now_ms)
            yield
        entries = iter(wanted.items())
        while part := dict(islice(entries, OFFSETS_PER_STEP)):
            table.merge(
                ConsumerOffsetSerializeWrapper(offset_table=part, data_version=wrapper.data_version)
            )
            yield
        table.version = wrapper.data_version
        self._persist(table)

    def commits_sent(self) -> None:
        """The master has got commits at this slave."""
        self._state.note_commits(self._commits)
        self._persist(self._state)

    def replace_delay_offsets(self, wrapper: DelayOffsetSerializeWrapper) -> None:
        """Take over the progress of the delay levels."""
        table = self._context.delay.table
        if wrapper != table.wrapper():
            table.replace(wrapper)
            self._persist(table)

    def replace_timer_progress(self, checkpoint: TimerCheckpoint) -> None:
        """Note the progress of the master's timer."""
        self._state.update(
            timer_read_ms=checkpoint.last_read_time_ms,
            timer_queue_offset=checkpoint.last_timer_queue_offset,
        )
        self._persist(self._state)

    def replace_ordered_pops(self, content: bytes) -> None:
        """Take over the open ordered pops of the master."""
        if self._ordered_pops.replace(content):
            self._persist(self._ordered_pops)

    def delivered_from(self, log_offset: int) -> None:
        """What the offsets do not contain is in the log from here on."""
        self._state.update(delivered_from=log_offset)
        self._persist(self._state)

    # --- users

    def replace_access(self, content: AccessFile, now_ms: int) -> None:
        """Take over users and access lists; the users in this broker's settings stay."""
        access = self._context.access
        access.table.replace(content)
        access.seed(now_ms)
        access.table.version = content.data_version
        log.info("copied %d users from the master", len(access.table.users))
        self._persist(access.table)


def _newest(queue: ConsumeQueue) -> int:
    """Log offset of the newest message of a queue; -1 if it has none."""
    entry = queue.entry(queue.max_offset - 1) if queue.max_offset > queue.min_offset else None
    return -1 if entry is None else entry[0]


def _log_changes(what: str, changed: int, gone: list[str]) -> None:
    if changed or gone:
        names = ", ".join(gone[:LISTED_MAX]) + (", …" if len(gone) > LISTED_MAX else "")
        deleted = f", {len(gone)} deleted ({names})" if gone else ""
        log.info("copied the %s of the master: %d new or changed%s", what, changed, deleted)
