"""A slave becomes the master: its tables and files are made ready for the services that write.

This happens when a broker is opened as a master over the store of a slave, before its services are
created. 3. is repeated if the broker is restarted before its timer has read its queue again: only
the log shows what was delivered. After that, the note of the slave is cleared.

1. Consumer offsets behind the end of their queue are set to that end. The old master had messages
   that never arrived here; new ones get their offsets.
2. Delay levels move behind the messages that the log shows as delivered.
3. The timer's files are to be rebuilt from its queue. Its checkpoint gets the progress of the old
   master, so that delivered messages are left out: those that were due long ago, and those that
   the log shows as delivered.
4. The position up to which op messages are known is dropped: it belongs to another log.
"""

import logging
from collections.abc import Container
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.delay.delivery_time import TimerKey
from penstock.broker.pop.revive_log import REVIVE_GROUP
from penstock.broker.replicas.replica_state import ReplicaFile, ReplicaState
from penstock.broker.takeover.delivered_messages import DeliveredMessages
from penstock.broker.transaction.half_queues import TransactionTable
from penstock.store.timer.timer_checkpoint import REBUILDING, TimerCheckpointFile, TimerProgress
from penstock.store.timer.timer_wheel import SLOTS

log = logging.getLogger(__name__)

LATE_MS: Final = 10_000
"""Timer messages that were due this long before the old master's progress may not be delivered:
they were stored late. Whether they were is found in the log."""


def take_over(context: BrokerContext, state: ReplicaState, now_ms: int) -> Container[TimerKey]:
    """Prepare the store of a slave for a master; returns timer messages that were delivered.

    Waits for the disk.
    """
    delivered = DeliveredMessages()
    delivered.search(context.store, state.content.delivered_from)
    if state.content.slave:
        log.info("this broker was a slave and is a master now")
        _take_over_tables(context, delivered, now_ms)
    _mark_timer(context, state.content, now_ms)
    state.begin_master()
    context.persistence.save(state)()
    return delivered.timers


def _take_over_tables(context: BrokerContext, delivered: DeliveredMessages, now_ms: int) -> None:
    persistence = context.persistence
    _limit_offsets(context, now_ms)
    delivered.advance(context.store, context.delay.table, now_ms)
    transactions = TransactionTable()
    transactions.load(persistence.file(TransactionTable.FILE))
    if transactions.searched_to:
        transactions.reset()
        persistence.save(transactions)()
    persistence.save(context.offsets.table)()
    persistence.save(context.delay.table)()


def _limit_offsets(context: BrokerContext, now_ms: int) -> None:
    table, store = context.offsets.table, context.store
    for key, queues in list(table.wrapper().offset_table.items()):
        topic, _, group = key.rpartition("@")
        for queue_id, offset in list(queues.items()):
            queue = store.queue(topic, queue_id)
            end = 0 if queue is None else queue.max_offset
            if group == REVIVE_GROUP:
                end -= 1  # it is the offset of the last finished entry
            if offset > end:
                log.warning(
                    "group %s continues at offset %d of queue %d of %s, not at %d: the messages "
                    "between did not reach this broker while it was a slave",
                    group,
                    end,
                    queue_id,
                    topic,
                    offset,
                )
                table.commit(topic, group, queue_id, end, now_ms)


def _mark_timer(context: BrokerContext, noted: ReplicaFile, now_ms: int) -> None:
    """Write a checkpoint of the timer that demands a rebuild."""
    store = context.store
    config = store.config
    file = TimerCheckpointFile(
        store.disk, store.paths.root / "config" / "timercheck", config.timer_precision_ms
    )
    progress = TimerProgress(noted.timer_read_ms - LATE_MS, 0, noted.timer_queue_offset)
    if not noted.timer_read_ms:  # the old master has none, or was never asked
        found = file.read(now_ms, SLOTS * config.timer_precision_ms)
        if found is None:
            return
        progress = found.progress._replace(log_end=0)
    file.write(file.pack(progress, REBUILDING), backup=True)
