"""Finding messages by what a user has: an id, a key, a time range or a place.

| Given | Search |
|---|---|
| `topic/broker/queue@offset` | that offset of that queue |
| an offset id | the broker that the id names |
| a unique id or a key | the index of the topic; without a topic, of up to `topics_max` topics |
| a topic and a time range | all queues of the topic by store time |

A message that its broker has not delivered to its topic yet (delayed, or the half message of a
transaction) is stored in an internal topic. Searches by unique id look there too.

The result says how it was found and what could not be searched. Brokers find messages by the hash
of a key in an index file: they return the newest ones, and none that is older than the index.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from penstock.client.admin.admin_core import timestamp_ms
from penstock.client.admin.admin_index import FOUND_MAX, query_index
from penstock.client.admin.async_admin import AsyncAdmin, BrokerAddress, TopicKind
from penstock.client.diagnosis.references import QueuePlace, read_offset_id, read_place
from penstock.client.diagnosis.wording import count_text
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, NoRoute, PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    PROPERTY_REAL_TOPIC,
    TOPIC_ROCKSDB_TRANS_HALF,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
    TOPIC_TRANS_HALF,
    is_internal_topic,
)

Progress: TypeAlias = Callable[[int, int], None]
"""Is told how many topics of how many were searched."""
TOPICS_MAX = 1_000
"""Topics that are searched if none is given."""
HALF_TOPICS = (TOPIC_TRANS_HALF, TOPIC_ROCKSDB_TRANS_HALF)
DELAY_TOPICS = (TOPIC_SCHEDULE, TOPIC_TIMER)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The messages that were found, oldest first."""

    messages: tuple[ReceivedMessage, ...]
    how: str
    """How they were searched, as a sentence."""
    topics: tuple[str, ...] = ()
    """The topics that were searched."""
    partial: tuple[str, ...] = ()
    """What could not be searched; each a sentence. Empty: the search was complete."""
    missing: tuple[str, ...] = ()
    """Those sentences of `partial` that only say that something given does not exist."""

    @property
    def is_partial(self) -> bool:
        return bool(self.partial)

    @property
    def is_incomplete(self) -> bool:
        """Whether anything could not be searched."""
        return not set(self.partial) <= set(self.missing)


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A range of store times; None: open."""

    since: datetime | None = None
    until: datetime | None = None

    @property
    def since_ms(self) -> int | None:
        return None if self.since is None else timestamp_ms(self.since)

    @property
    def until_ms(self) -> int | None:
        return None if self.until is None else timestamp_ms(self.until)

    def __bool__(self) -> bool:
        return self.since is not None or self.until is not None


async def find_messages(
    admin: AsyncAdmin,
    what: str | None = None,
    *,
    topic: str | None = None,
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    tags: str = "*",
    sql: str | None = None,
    newest_first: bool = False,
    count_max: int = FOUND_MAX,
    topics_max: int = TOPICS_MAX,
    progress: Progress | None = None,
) -> SearchResult:
    """Find messages by what is known of them.

    `what` is a unique id, an offset id, a key, or a place (`topic/broker/queue@offset`); `key`
    searches only keys. With neither, the messages of the topic in the time range are listed, by
    tags or an SQL92 expression. Raises InvalidParameter if nothing at all is given.
    """
    span = TimeRange(since, until)
    if what is not None and key is not None:
        raise InvalidParameter("both an id and a key are given", hint="give one of them")
    if what is not None:
        place = read_place(what)
        if place is not None:
            return await _at_place(admin, place)
        return await _by_id_or_key(
            admin, what.strip(), topic, span, count_max, topics_max, progress
        )
    if key is not None:
        return await search_indexes(
            admin,
            key,
            topic,
            span,
            count_max=count_max,
            topics_max=topics_max,
            ids=False,
            progress=progress,
        )
    if topic is None:
        raise InvalidParameter(
            "there is nothing to search for", hint="give an id, a key, a place, or a topic"
        )
    page = await admin.browse(
        topic,
        since=since,
        until=until,
        tags=tags,
        sql=sql,
        newest_first=newest_first,
        count_max=count_max,
    )
    partial = (
        () if page.resume is None else (f"the topic has more messages; {count_max} are listed",)
    )
    when = "in the time range" if span else "of all times"
    how = f"read the messages {when} from all queues of {topic}, by store time"
    return SearchResult(page.messages, how, (topic,), partial)


async def _at_place(admin: AsyncAdmin, place: QueuePlace) -> SearchResult:
    queue = place.queue
    if not is_internal_topic(queue.topic):
        await _check_broker(admin, queue)
    message = await admin.message_at(queue, place.offset)
    how = f"read offset {place.offset} of queue {queue.queue_id} of {queue.topic}"
    how += f" on {queue.broker_name}"
    return SearchResult(() if message is None else (message,), how, (queue.topic,))


async def _check_broker(admin: AsyncAdmin, queue: MessageQueue) -> None:
    """Raise NoRoute for a topic or a broker that does not exist."""
    names = {broker.name for broker in await admin.brokers()}
    if queue.broker_name in names:
        return
    names |= set((await admin.route(queue.topic)).brokers)
    if queue.broker_name not in names:
        known = ", ".join(sorted(names)) or "none"
        raise NoRoute(
            f"there is no broker {queue.broker_name!r} (brokers: {known})",
            hint="check the place; it is written TOPIC/BROKER/QUEUE@OFFSET",
        )


async def _by_id_or_key(
    admin: AsyncAdmin,
    text: str,
    topic: str | None,
    span: TimeRange,
    count_max: int,
    topics_max: int,
    progress: Progress | None,
) -> SearchResult:
    partial: tuple[str, ...] = ()
    place = read_offset_id(text)
    if place is not None and await _is_broker(admin, f"{place.host}:{place.port}"):
        try:
            message = await admin.message_by_offset_id(text, topic=topic)
        except PenstockError as error:
            message, partial = None, (f"the broker of the offset id was not searched: {error}",)
        if message is not None:
            how = f"read the message at log offset {place.offset} of the broker in the offset id"
            return SearchResult((message,), how, (message.queue.topic,))
    found = await search_indexes(
        admin,
        text,
        topic,
        span,
        count_max=count_max,
        topics_max=topics_max,
        ids=True,
        progress=progress,
    )
    return SearchResult(found.messages, found.how, found.topics, partial + found.partial)


async def _is_broker(admin: AsyncAdmin, address: str) -> bool:
    """Whether the address may be a broker's: one with a host name may have any IP address."""
    addresses = [broker.address for broker in await admin.brokers()]
    port = address.rpartition(":")[2]
    named = (a for a in addresses if not a.rpartition(":")[0].replace(".", "").isdigit())
    return address in addresses or any(a.endswith(f":{port}") for a in named)


async def search_indexes(
    admin: AsyncAdmin,
    text: str,
    topic: str | None,
    span: TimeRange,
    *,
    count_max: int = FOUND_MAX,
    topics_max: int = TOPICS_MAX,
    ids: bool,
    progress: Progress | None = None,
) -> SearchResult:
    """Search the index of a topic, or of all topics, for a key and, with `ids`, a unique id."""
    partial: list[str] = []
    if topic is not None:
        topics = [topic]
        how = f"searched the index of {topic}"
    else:
        every = [info.name for info in await admin.topics(kind=TopicKind.NORMAL)]
        topics = every[:topics_max]
        how = f"searched the indexes of {count_text(len(topics), 'topic')}"
        if len(topics) < len(every):
            partial.append(
                f"{len(every) - len(topics):,} of {len(every):,} topics were not searched: give the"
                " topic"
            )
    internal = [*DELAY_TOPICS, *HALF_TOPICS] if ids else []
    found, problems = await query_topics(
        admin,
        [*topics, *internal],
        text,
        span=span,
        count_max=count_max,
        unique=ids,
        progress=progress,
    )
    messages = [
        message
        for message in found
        if (ids and message.unique_id == text)
        or (text in message.keys and message.queue.topic not in internal)
    ]
    if topic is not None:
        full = admin.session.with_namespace(topic)
        messages = [
            message
            for message in messages
            if message.queue.topic not in internal
            or message.properties.get(PROPERTY_REAL_TOPIC) == full
            or topic in internal
        ]
    if internal:
        how += ", and the internal topics of delayed and half messages"
    how += f" for {'the id or key' if ids else 'the key'} {text[:80]}"
    return SearchResult(tuple(messages), how, tuple(topics), (*partial, *problems))


async def query_topics(
    admin: AsyncAdmin,
    topics: Sequence[str],
    key: str,
    *,
    span: TimeRange | None = None,
    count_max: int = FOUND_MAX,
    unique: bool = True,
    progress: Progress | None = None,
) -> tuple[list[ReceivedMessage], tuple[str, ...]]:
    """The messages under a key in the indexes of topics, oldest first; and what is missing."""
    span = span or TimeRange()
    masters = await admin.masters()
    problems: dict[str, None] = {}
    for name in await admin.brokers_without_master():
        problems[f"{name} has no master and was not searched"] = None

    async def one(topic: str) -> list[ReceivedMessage]:
        try:
            found = await query_index(
                admin,
                masters,
                admin.session.with_namespace(topic),
                key,
                since_ms=span.since_ms,
                until_ms=span.until_ms,
                count_max=count_max,
                unique=unique,
            )
        except PenstockError as error:
            problems[_not_searched(masters, topic, error)] = None
            return []
        for name in found.unreachable:
            problems[f"{name} can't be reached and was not searched"] = None
        for broker, messages in found.items:
            if len(messages) >= count_max:
                problems[
                    f"{broker.name} has more than {count_text(count_max, 'message')} of {topic}"
                ] = None
        return [message for _, messages in found.items for message in messages]

    done = 0

    async def counted(topic: str) -> list[ReceivedMessage]:
        nonlocal done
        found = await one(topic)
        done += 1
        if progress is not None:
            progress(done, len(topics))
        return found

    parts = await admin.for_each(list(topics), counted)
    return _by_time(message for part in parts for message in part), tuple(problems)


def _not_searched(masters: Sequence[BrokerAddress], topic: str, error: PenstockError) -> str:
    names = ", ".join(broker.name for broker in masters)
    return f"{topic} was not searched on {names}: {error.message}"


def _by_time(messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
    unique = {(m.broker_name, m.physical_offset): m for m in messages}
    return sorted(unique.values(), key=lambda m: (m.store_ms, m.physical_offset))
