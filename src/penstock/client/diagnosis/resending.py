"""Sending messages again: select, plan, send, report.

    found = await select_dead_letters(admin, "billing", since=yesterday)
    plan = await plan_resend(admin, found.messages, group="billing")
    report = await resend(admin, plan, rate=50)

A copy goes to the message's original topic, where all groups receive it, or to the retry topic of
one group. It keeps body, id, keys, tags and the application's properties. Delivery is at least
once: a send whose response was lost may have stored the copy and counts as failed, and a plan that
is executed twice sends everything twice. Dead letters stay in their topic.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from penstock.client.admin.admin_resend import origin_topic
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.consumer.subscription import split_tags
from penstock.client.diagnosis.cluster_queries import attempt
from penstock.client.diagnosis.message_evidence import Unknown
from penstock.client.diagnosis.references import read_offset_id, read_place
from penstock.client.diagnosis.search import SearchResult, TimeRange, find_messages, query_topics
from penstock.client.diagnosis.values import MessagePlace
from penstock.client.messages import MessageQueue, SendReceipt
from penstock.client.received_message import ReceivedMessage
from penstock.clock import pause
from penstock.errors import InvalidParameter, PenstockError
from penstock.plurals import count_text
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_internal_topic

SELECTED_MAX = 1_000
"""Messages of one selection unless specified."""
FAILURES_MAX = 10
"""After this many failures in a row, the rest is not sent."""
_PAGE = 256


@dataclass(frozen=True, slots=True)
class ResendItem:
    """A message of the plan and the topic that its copy goes to."""

    message: ReceivedMessage
    target: str

    @property
    def place(self) -> MessagePlace:
        return MessagePlace.of(self.message)


@dataclass(frozen=True, slots=True)
class SkippedMessage:
    """A message that is not sent again."""

    place: MessagePlace
    reason: str


@dataclass(frozen=True, slots=True)
class ResendPlan:
    """What `resend` will send."""

    items: tuple[ResendItem, ...]
    skipped: tuple[SkippedMessage, ...]
    group: str | None
    """The only group that receives the copies; None: all groups of the topic."""
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> Mapping[str, int]:
        """The number of messages by the topic that they go to."""
        return dict(sorted(Counter(item.target for item in self.items).items()))

    @property
    def bytes(self) -> int:
        """The size of all stored bodies."""
        return sum(item.message.body_length for item in self.items)


@dataclass(frozen=True, slots=True)
class ResendProgress:
    """How far a resend is."""

    sent: int
    failed: int
    total: int


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """A message whose copy was not acknowledged. It may have been stored all the same."""

    item: ResendItem
    error: PenstockError


@dataclass(frozen=True, slots=True)
class ResendReport:
    """What was sent."""

    sent: tuple[tuple[ResendItem, SendReceipt], ...]
    failed: tuple[FailedMessage, ...]
    skipped: tuple[SkippedMessage, ...]
    spent_ms: int

    @property
    def is_complete(self) -> bool:
        """Whether every message of the plan was sent."""
        return not self.failed and not self.skipped


# --- selection -----------------------------------------------------------------------------------


async def select_dead_letters(
    admin: AsyncAdmin,
    group: str,
    *,
    ids: Sequence[str] = (),
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    tags: str = "*",
    count_max: int = SELECTED_MAX,
    progress: Callable[[int], None] | None = None,
) -> SearchResult:
    """The dead letters of a group by ids, or by key, time range and tags; oldest first.

    An id is a unique id, an offset id or a place. The times are those at which the messages became
    dead letters. `partial` of the result names ids that were not found. `progress` is told how many
    were read, unless ids or a key are given.
    """
    topic = DLQ_TOPIC_PREFIX + group
    if await admin.session.find_route(admin.session.with_namespace(topic)) is None:
        missing = tuple(f"the dead letter {one} was not found" for one in ids)
        how = f"{group} has no dead letter topic"
        return SearchResult((), how, (topic,), missing, missing)
    if ids and (key is not None or since or until):
        raise InvalidParameter(
            "ids are given with a key or a time range", hint="give ids, or conditions"
        )
    wanted = split_tags(tags)
    if ids:
        found = await _by_ids(admin, topic, ids)
    elif key is not None:
        span = TimeRange(since, until)
        messages, problems = await query_topics(
            admin, [topic], key, span=span, count_max=count_max, unique=False
        )
        keyed = tuple(message for message in messages if key in message.keys)
        found = SearchResult(keyed, f"searched the index of {topic}", (topic,), problems)
    else:
        found = await _pages(admin, topic, since, until, tags, count_max, progress=progress)
    chosen = tuple(m for m in found.messages if wanted is None or m.tags in wanted)
    return replace(found, messages=chosen)


async def select_messages(
    admin: AsyncAdmin,
    topic: str,
    *,
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    tags: str = "*",
    sql: str | None = None,
    count_max: int = SELECTED_MAX,
) -> SearchResult:
    """Messages of a topic by key or by time range, tags or an SQL92 expression; oldest first."""
    if key is None:
        return await _pages(admin, topic, since, until, tags, count_max, sql)
    found = await find_messages(
        admin, key=key, topic=topic, since=since, until=until, count_max=count_max
    )
    wanted = split_tags(tags)
    chosen = tuple(m for m in found.messages if wanted is None or m.tags in wanted)
    return replace(found, messages=chosen)


async def _by_ids(admin: AsyncAdmin, topic: str, ids: Sequence[str]) -> SearchResult:
    problems: dict[str, None] = {}
    missing: list[str] = []
    chosen: dict[tuple[str, int], ReceivedMessage] = {}

    async def one(text: str) -> list[ReceivedMessage]:
        if read_place(text) is not None:
            messages = list((await find_messages(admin, text)).messages)
        else:
            messages, more = await query_topics(admin, [topic], text)
            problems.update(dict.fromkeys(more))
            messages = [message for message in messages if message.unique_id == text][-1:]
            if not messages and read_offset_id(text) is not None:
                found = await attempt(admin.message_by_offset_id(text, topic=topic))
                messages = [found] if isinstance(found, ReceivedMessage) else []
        return [message for message in messages if message.queue.topic == topic]

    for text, messages in zip(ids, await admin.for_each(list(ids), one), strict=True):
        if not messages:
            missing.append(f"the dead letter {text} was not found")
        for message in messages:
            chosen[message.broker_name, message.physical_offset] = message
    ordered = tuple(sorted(chosen.values(), key=lambda m: m.store_ms))
    how, partial = f"searched {topic} by ids", (*problems, *missing)
    return SearchResult(ordered, how, (topic,), partial, tuple(missing))


async def _pages(
    admin: AsyncAdmin,
    topic: str,
    since: datetime | None,
    until: datetime | None,
    tags: str,
    count_max: int,
    sql: str | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> SearchResult:
    messages: list[ReceivedMessage] = []
    resume: Mapping[MessageQueue, int] | None = None
    while len(messages) < count_max:
        page = await admin.browse(
            topic,
            since=since,
            until=until,
            tags=tags,
            sql=sql,
            count_max=min(_PAGE, count_max - len(messages)),
            resume=resume,
        )
        messages += page.messages
        if progress is not None:
            progress(len(messages))
        resume = page.resume
        if resume is None:
            break
    selected = f"only the first {count_text(count_max, 'message')} of {topic} can be selected"
    partial = () if resume is None else (selected,)
    return SearchResult(tuple(messages), f"read {topic} by store time", (topic,), partial)


# --- plan and execution --------------------------------------------------------------------------


async def plan_resend(
    admin: AsyncAdmin, messages: Iterable[ReceivedMessage], *, group: str | None = None
) -> ResendPlan:
    """What sending these messages again would do: to their topics, or only to one group.

    Nothing is sent. Messages that have no topic to go to, and repeated ones, are skipped.
    """
    items: list[ResendItem] = []
    skipped: list[SkippedMessage] = []
    seen: set[tuple[str, int]] = set()
    for message in messages:
        place = MessagePlace.of(message)
        origin = origin_topic(message)
        if (message.broker_name, message.physical_offset) in seen:
            continue
        seen.add((message.broker_name, message.physical_offset))
        if origin is None:
            internal = is_internal_topic(message.stored_topic)
            reason = "its broker has not delivered it yet" if internal else "its topic is not known"
            skipped.append(SkippedMessage(place, reason))
            continue
        target = RETRY_TOPIC_PREFIX + group if group is not None else origin
        items.append(ResendItem(message, admin.session.without_namespace(target)))
    warnings = () if group is None or not items else await _warnings(admin, group)
    return ResendPlan(tuple(items), tuple(skipped), group, warnings)


async def _warnings(admin: AsyncAdmin, group: str) -> tuple[str, ...]:
    members = await attempt(admin.members(group))
    if isinstance(members, Unknown):
        return (f"the members of {group} are not known: {members.reason}",)
    if members.consume_type == "CONSUME_POP":
        return (f"{group} consumes with POP and does not read its retry topic: send to the topic",)
    if not members.members and not members.unreachable:
        return (f"{group} has no connected member; the copies wait in its retry topic",)
    return ()


async def resend(
    admin: AsyncAdmin,
    plan: ResendPlan,
    *,
    rate: float | None = None,
    progress: Callable[[ResendProgress], None] | None = None,
    failures_max: int = FAILURES_MAX,
) -> ResendReport:
    """Send the messages of a plan again, in its order, at most `rate` per second.

    A failed send does not end it; after `failures_max` failures in a row the rest is skipped.
    """
    if rate is not None and rate <= 0:
        raise InvalidParameter(f"the rate is {rate}", hint="give messages per second, above 0")
    clock = admin.session.clock
    began_ms = clock.monotonic_ms()
    sent: list[tuple[ResendItem, SendReceipt]] = []
    failed: list[FailedMessage] = []
    skipped = list(plan.skipped)
    in_a_row = 0
    for number, item in enumerate(plan.items):
        if in_a_row >= failures_max:
            reason = f"the {in_a_row} messages before it failed"
            skipped.append(SkippedMessage(item.place, reason))
            continue
        wait_ms = 0
        if rate is not None:
            wait_ms = began_ms + round(number * 1000 / rate) - clock.monotonic_ms()
        if wait_ms > 0:
            await pause(clock, wait_ms)
        try:
            sent.append((item, await admin.resend_message(item.message, group=plan.group)))
            in_a_row = 0
        except PenstockError as error:
            failed.append(FailedMessage(item, error))
            in_a_row += 1
        if progress is not None:
            progress(ResendProgress(len(sent), len(failed), len(plan.items)))
    spent_ms = clock.monotonic_ms() - began_ms
    return ResendReport(tuple(sent), tuple(failed), tuple(skipped), spent_ms)
