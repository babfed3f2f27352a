"""The copies that brokers make of a message: for redelivery, later delivery, transactions."""

from collections.abc import Sequence

from penstock.client.admin.admin_browse import QueueView
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.consumer.subscription import Subscription
from penstock.client.diagnosis.cluster_queries import attempt
from penstock.client.diagnosis.message_evidence import (
    DelayedCopy,
    HalfCopy,
    RetryCopy,
)
from penstock.client.diagnosis.search import DELAY_TOPICS, HALF_TOPICS
from penstock.client.diagnosis.values import MessagePlace
from penstock.client.received_message import ReceivedMessage
from penstock.errors import PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    GROUP_SYS_TRANS,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    RETRY_TOPIC_PREFIX,
    TOPIC_ROCKSDB_TRANS_OP_HALF,
    TOPIC_SCHEDULE,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
    is_internal_topic,
)
from penstock.wire.java_numbers import parse_nonnegative

OPS_MAX = 2_000
"""Op messages that are read to find the end of a transaction."""
_PULL_COUNT = 32
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def is_internal(topic: str) -> bool:
    """Whether only brokers read the topic."""
    return is_internal_topic(topic) or topic in DELAY_TOPICS or topic in HALF_TOPICS


# --- redelivery ----------------------------------------------------------------------------------


async def retry_copies(
    admin: AsyncAdmin,
    group: str,
    retry_names: Sequence[str],
    copies: Sequence[ReceivedMessage],
    delays: Sequence[ReceivedMessage],
) -> tuple[RetryCopy, ...]:
    """The copies for redelivery to a group: in its retry topics, or waiting in a delay topic."""
    found: list[RetryCopy] = []
    for message in copies:
        if message.stored_topic in retry_names:
            committed = await attempt(admin.committed_offset(group, message.queue))
            place = MessagePlace.of(message)
            found.append(RetryCopy(place, message.reconsume_times, committed=committed))
    for message in delays:
        if message.properties.get(PROPERTY_REAL_TOPIC) not in retry_names:
            continue
        place, number = MessagePlace.of(message), message.reconsume_times
        delivered = any(c.attempt >= number and c.place.store_ms >= place.store_ms for c in found)
        if not delivered:
            due_ms = await _due_ms(admin, message)
            found.append(RetryCopy(place, number, due_ms, waits=True))
    return tuple(sorted(found, key=lambda copy: copy.place.store_ms))


# --- later delivery ------------------------------------------------------------------------------


async def delayed_copy(admin: AsyncAdmin, delays: Sequence[ReceivedMessage]) -> DelayedCopy | None:
    """The message before its delivery to its topic: the last copy in a delay topic."""
    for message in reversed(delays):
        name = message.properties.get(PROPERTY_REAL_TOPIC)
        if name is not None and not name.startswith(RETRY_TOPIC_PREFIX):
            topic = admin.session.without_namespace(name)
            return DelayedCopy(MessagePlace.of(message), topic, await _due_ms(admin, message))
    return None


async def _due_ms(admin: AsyncAdmin, message: ReceivedMessage) -> int | None:
    """When a message in a delay topic is delivered; None if it is not known."""
    if message.stored_topic == TOPIC_SCHEDULE:
        try:
            settings = await admin.broker_settings(message.broker_name)
        except PenstockError:
            return None
        delays = level_delays_ms(settings.get("messageDelayLevel", ""))
        level = message.queue_id
        return message.store_ms + delays[level] if level < len(delays) else None
    properties = message.properties
    text = properties.get(PROPERTY_TIMER_OUT_MS) or properties.get(PROPERTY_TIMER_DELIVER_MS, "")
    return parse_nonnegative(text)


def level_delays_ms(levels: str) -> list[int]:
    """The delays of levels such as `1s 5m 2h`; empty if the text is something else."""
    delays = []
    for level in levels.split():
        number, unit = parse_nonnegative(level[:-1]), _UNIT_MS.get(level[-1])
        if number is None or unit is None:
            return []
        delays.append(number * unit)
    return delays


# --- transactions --------------------------------------------------------------------------------


async def half_copy(admin: AsyncAdmin, halves: Sequence[ReceivedMessage]) -> HalfCopy | None:
    """The half message of a transaction: the last copy, since each check may store it again."""
    if not halves:
        return None
    last = halves[-1]
    checks = parse_nonnegative(last.properties.get(PROPERTY_TRANSACTION_CHECK_TIMES, "0"))
    resolved = await attempt(_is_resolved(admin, halves))
    topic = admin.session.without_namespace(last.properties.get(PROPERTY_REAL_TOPIC, ""))
    return HalfCopy(MessagePlace.of(last), topic, checks or 0, resolved)


async def _is_resolved(admin: AsyncAdmin, halves: Sequence[ReceivedMessage]) -> bool:
    """Whether the transaction ended: its broker is past it, or an op message names it.

    Op messages name the offsets of half messages in the queue with the same number. Penstock's
    brokers do not let clients read them. Raises PenstockError, also if there are too many of them.
    """
    last = halves[-1]
    done = await admin.committed_offset(GROUP_SYS_TRANS, last.queue)
    if done is not None and done > last.queue_offset:
        return True
    is_usual = last.stored_topic == TOPIC_TRANS_HALF
    topic = TOPIC_TRANS_OP_HALF if is_usual else TOPIC_ROCKSDB_TRANS_OP_HALF
    queue = MessageQueue(topic, last.broker_name, last.queue_id)
    offsets = {str(message.queue_offset) for message in halves}
    if await admin.session.find_route(topic) is None:
        return False
    view = QueueView(admin)
    at, end = await view.offset_at(queue, halves[0].store_ms), await view.max_offset(queue)
    stop = min(end, at + OPS_MAX)
    while at < stop:
        pulled = await view.pull(queue, at, _PULL_COUNT, Subscription(topic))
        for op in pulled.messages:
            if offsets & set(op.body.decode("utf-8", "replace").split(",")):
                return True
        if pulled.next_offset <= at:
            break
        at = pulled.next_offset
    if stop < end:
        raise PenstockError(f"{last.broker_name} has more than {OPS_MAX} op messages since then")
    return False
