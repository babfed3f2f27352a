"""What the members of a group have received and not acknowledged yet, as they tell it themselves.

Members tell the oldest offset of each queue that they pull. POP consumers tell only how many
messages they have, and clients behind a gRPC proxy tell nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.consumer.broker_requests import QUEUE_FIELDS, queue_field
from penstock.errors import PenstockError
from penstock.wire.bodies.admin_bodies import ConsumerRunningInfo
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.java_numbers import parse_nonnegative

READS_MAX = 32
"""Queues whose oldest message is read; those whose members finished something longest ago."""


@dataclass(frozen=True, slots=True)
class QueueWork:
    """What a member has of one of its queues. An unknown value is None."""

    client_id: str
    count: int
    """Messages that it has received and not acknowledged."""
    oldest_offset: int | None = None
    """Of the first of them; None if there is none, or if the member pops the queue."""
    since_ms: int | None = None
    """When its handler received the oldest one; only Penstock's consumers tell it."""
    last_consume_ms: int | None = None
    is_popped: bool = False


@dataclass(frozen=True, slots=True)
class OldestInWork:
    """The oldest message that a member has received and not acknowledged."""

    queue: MessageQueue
    offset: int
    store_ms: int
    work: QueueWork


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The work of all members of a group."""

    queues: Mapping[MessageQueue, QueueWork] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    """Members that do not answer."""
    oldest: OldestInWork | None = None
    problem: str | None = None
    """Why the oldest message is unknown. Without it and without `oldest`, nothing is in work."""


async def read_group_work(admin: AsyncAdmin, group: str, client_ids: Iterable[str]) -> GroupWork:
    """Ask the members what they have, and read the store time of the oldest messages."""

    async def ask(client_id: str) -> ConsumerRunningInfo | None:
        try:
            return await admin.running_info(group, client_id)
        except PenstockError:
            return None

    asked = list(client_ids)
    infos = dict(zip(asked, await admin.for_each(asked, ask), strict=True))
    queues = {
        queue: work
        for client_id, info in infos.items()
        if info is not None
        for queue, work in _work_of(admin, client_id, info).items()
    }
    silent = tuple(client_id for client_id, info in infos.items() if info is None)
    oldest, problem = await _oldest(admin, queues)
    if silent:
        problem = "not all members tell what they have"
    return GroupWork(queues, silent, oldest if problem is None else None, problem)


def _work_of(
    admin: AsyncAdmin, client_id: str, info: ConsumerRunningInfo
) -> dict[MessageQueue, QueueWork]:
    found = {
        admin.bare_queue(queue): QueueWork(client_id, popped.wait_ack_count, is_popped=True)
        for queue, popped in info.mq_pop_table.items()
    }
    for queue, state in info.mq_table.items():
        count = state.cached_msg_count
        since = info.user_consumer_info.get(queue_field(QUEUE_FIELDS[0], queue), "")
        found[admin.bare_queue(queue)] = QueueWork(
            client_id,
            count,
            oldest_offset=state.cached_msg_min_offset if count else None,
            since_ms=parse_nonnegative(since) if count else None,
            last_consume_ms=state.last_consume_timestamp or None,
        )
    return found


async def _oldest(
    admin: AsyncAdmin, queues: Mapping[MessageQueue, QueueWork]
) -> tuple[OldestInWork | None, str | None]:
    """The oldest message of all queues, or why it is unknown."""
    if any(work.is_popped and work.count for work in queues.values()):
        return None, "POP consumers tell how many messages they have, but not which"
    held = [(queue, work) for queue, work in queues.items() if work.oldest_offset is not None]
    held.sort(key=lambda one: one[1].last_consume_ms or 0)

    async def read(one: tuple[MessageQueue, QueueWork]) -> OldestInWork | None:
        queue, work = one
        offset = work.oldest_offset
        assert offset is not None
        try:
            message = await admin.message_at(queue, offset)
        except PenstockError:
            return None
        if message is None:
            return None
        return OldestInWork(queue, offset, message.store_ms, work)

    found = await admin.for_each(held[:READS_MAX], read)
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None, "not all messages that are in work can be read"
    return min(known, key=lambda one: one.store_ms, default=None), None
