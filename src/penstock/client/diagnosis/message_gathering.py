"""Gathers what is known about a message and a group; concludes nothing.

A query that fails leaves an `Unknown` with the reason. The message is searched by what the caller
has; its copies in retry, dead letter, delay and half topics are searched by its unique id.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from penstock.client.admin.admin_browse import QueueView
from penstock.client.admin.admin_resend import origin_topic
from penstock.client.admin.async_admin import AsyncAdmin, GroupMembers
from penstock.client.consumer.subscription import SQL92, Subscription
from penstock.client.diagnosis.cluster_queries import (
    attempt,
    group_settings,
    is_forbidden,
    member_states,
    similar_groups,
)
from penstock.client.diagnosis.message_copies import (
    delayed_copy,
    half_copy,
    is_internal,
    retry_copies,
)
from penstock.client.diagnosis.message_evidence import (
    Absence,
    Known,
    MemberState,
    MessageEvidence,
    RouteEvidence,
    Unknown,
)
from penstock.client.diagnosis.references import made_ms, read_offset_id, read_place
from penstock.client.diagnosis.search import (
    DELAY_TOPICS,
    HALF_TOPICS,
    SearchResult,
    find_messages,
    query_topics,
)
from penstock.client.diagnosis.traces import MessageTrace, trace_message
from penstock.client.diagnosis.values import MessagePlace
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, PenstockError
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    MASTER_ID,
    PERM_READ,
    POP_RETRY_SEPARATOR_V1,
    POP_RETRY_SEPARATOR_V2,
    RETRY_TOPIC_PREFIX,
)

_COPY_PREFIXES = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)


async def gather_message(
    admin: AsyncAdmin, wanted: str, group: str, topic: str | None = None
) -> MessageEvidence:
    """All that the cluster tells about a message and a group; raises if no NameServer answers."""
    found = await _find(admin, wanted, topic)
    originals = [m for m in found.messages if _is_original(m)]
    message = originals[-1] if originals else None
    if message is None:
        message, found = await _original_of_copy(admin, found)
        originals = [] if message is None else [message]
    topic = topic or _topic_of(message, found.messages)
    unique_id = (found.messages[-1].unique_id if found.messages else None) or (
        wanted if read_place(wanted) is None else None
    )
    evidence = MessageEvidence(
        wanted=wanted,
        group=group,
        topic=topic,
        now_ms=admin.session.clock.now_ms(),
        how=found.how,
        partial=found.partial,
        copies=len(originals),
        message=None if message is None else MessagePlace.of(message),
    )
    evidence = await _with_copies(admin, evidence, found.messages, unique_id)
    traces = None if unique_id is None else await attempt(trace_message(admin, unique_id))
    if isinstance(traces, MessageTrace):
        mine = tuple(one for one in traces.deliveries if one.group == group)
        evidence = replace(evidence, deliveries=mine)
    if message is None:
        evidence = replace(evidence, absence=await _absence(admin, wanted))
    if topic is None:
        return evidence
    evidence = await _with_group(admin, evidence, topic)
    if message is None and evidence.route is None:
        error = await admin.session.nameservers.no_route(admin.session.with_namespace(topic))
        evidence = replace(evidence, no_topic=error.message)
    return evidence


# --- the message ---------------------------------------------------------------------------------


async def _find(admin: AsyncAdmin, wanted: str, topic: str | None) -> SearchResult:
    try:
        return await find_messages(admin, wanted, topic=topic)
    except InvalidParameter:
        raise
    except PenstockError as error:
        await admin.brokers()  # without a NameServer nothing can be explained
        return SearchResult((), f"searched for {wanted}", (), (f"the search failed: {error}",))


def _is_original(message: ReceivedMessage) -> bool:
    name = message.queue.topic
    return not is_internal(name) and not name.startswith(_COPY_PREFIXES)


async def _original_of_copy(
    admin: AsyncAdmin, found: SearchResult
) -> tuple[ReceivedMessage | None, SearchResult]:
    """The message that a retry copy or dead letter was made of, if it still exists."""
    copy = next((m for m in found.messages if m.queue.topic.startswith(_COPY_PREFIXES)), None)
    origin = None if copy is None else origin_topic(copy)
    if copy is None or origin is None or copy.unique_id is None:
        return None, found
    more = await _find(admin, copy.unique_id, admin.session.without_namespace(origin))
    originals = [m for m in more.messages if _is_original(m)]
    partial = found.partial + more.partial
    both = (*found.messages, *more.messages)
    merged = SearchResult(both, found.how, found.topics + more.topics, partial)
    return (originals[-1] if originals else None), merged


def _topic_of(message: ReceivedMessage | None, found: Sequence[ReceivedMessage]) -> str | None:
    if message is not None:
        return message.queue.topic
    origins = (MessagePlace.of(copy).origin for copy in reversed(found))
    return next((name for name in origins if name is not None), None)


async def _with_copies(
    admin: AsyncAdmin,
    evidence: MessageEvidence,
    found: Sequence[ReceivedMessage],
    unique_id: str | None,
) -> MessageEvidence:
    """Copies of the message: for redelivery, dead letters, and before its delivery."""
    if unique_id is None:
        reason = "the message has no unique id, by which its copies are found"
        return replace(evidence, retries=Unknown(reason), dead=Unknown(reason))
    full, group, topic = admin.session.with_namespace, evidence.group, evidence.topic
    retry_names = [RETRY_TOPIC_PREFIX + full(group)]
    if topic is not None:
        retry_names += [
            f"{RETRY_TOPIC_PREFIX}{full(group)}{separator}{full(topic)}"
            for separator in (POP_RETRY_SEPARATOR_V1, POP_RETRY_SEPARATOR_V2)
        ]
    dead_name = DLQ_TOPIC_PREFIX + full(group)
    names = [*retry_names, dead_name, *DELAY_TOPICS, *HALF_TOPICS]
    copies, problems = await query_topics(admin, names, unique_id)
    given = {(m.broker_name, m.physical_offset): m for m in (*copies, *found)}
    mine = sorted((m for m in given.values() if m.unique_id == unique_id), key=lambda m: m.store_ms)
    delays = [m for m in mine if m.stored_topic in DELAY_TOPICS]
    if problems and not mine:
        return replace(
            evidence,
            partial=_merged(evidence.partial, problems),
            retries=Unknown(problems[0]),
            dead=Unknown(problems[0]),
        )
    dead = tuple(MessagePlace.of(m) for m in mine if m.stored_topic == dead_name)
    retries = await retry_copies(admin, group, retry_names, mine, delays)
    evidence = replace(
        evidence,
        partial=_merged(evidence.partial, problems),
        retries=retries,
        dead=dead,
        pops=any(m.stored_topic in retry_names[1:] for m in mine),
    )
    if evidence.message is not None:
        return evidence
    return replace(
        evidence,
        delayed=await delayed_copy(admin, delays),
        half=await half_copy(admin, [m for m in mine if m.stored_topic in HALF_TOPICS]),
    )


def _merged(*parts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for part in parts for text in part))


async def _absence(admin: AsyncAdmin, wanted: str) -> Absence:
    """What the brokers still have, for a message that was not found."""
    place = read_place(wanted)
    if place is not None:
        view, queue = QueueView(admin), admin.full_queue(place.queue)
        low, high = await asyncio.gather(
            attempt(view.min_offset(queue)), attempt(view.max_offset(queue))
        )
        return Absence(None, None, place.offset, _or_none(low), _or_none(high))
    brokers = await admin.masters()
    infos = await admin.for_each(brokers, lambda b: attempt(admin.broker_runtime_info(b.name)))
    at = read_offset_id(wanted)
    for broker, info in zip(brokers, infos, strict=True):
        if at is not None and broker.address == f"{at.host}:{at.port}":
            if isinstance(info, Unknown):
                return Absence(None, None, at.offset)
            return Absence(None, None, at.offset, info.log_begin, info.log_end)
    times = [None if isinstance(info, Unknown) else info.earliest_ms for info in infos]
    known = [time for time in times if time is not None]
    earliest_ms = min(known) if known and len(known) == len(times) else None
    return Absence(made_ms(wanted, admin.session.clock.now_ms()), earliest_ms)


def _or_none(value: Known[int]) -> int | None:
    return None if isinstance(value, Unknown) else value


# --- the group -----------------------------------------------------------------------------------


async def _with_group(admin: AsyncAdmin, evidence: MessageEvidence, topic: str) -> MessageEvidence:
    group, place = evidence.group, evidence.message
    broker = None if place is None else place.broker
    route, settings, members = await asyncio.gather(
        attempt(_route(admin, topic, broker)),
        attempt(group_settings(admin, group)),
        attempt(admin.members(group)),
    )
    states: tuple[MemberState, ...] = ()
    pops = evidence.pops
    if not isinstance(members, Unknown):
        states = await member_states(admin, group, members)
        pops = pops or members.consume_type == "CONSUME_POP"
    pops = pops or any(q.info is None for state in states for q in state.queues.values())
    evidence = replace(
        evidence,
        route=route,
        settings=settings,
        similar=await similar_groups(admin, group, settings),
        members=members,
        states=states,
        pops=pops,
    )
    if place is None:
        return evidence
    return await _with_queue(admin, evidence, place, members)


async def _with_queue(
    admin: AsyncAdmin,
    evidence: MessageEvidence,
    place: MessagePlace,
    members: Known[GroupMembers],
) -> MessageEvidence:
    """The group's progress in the queue of the message, and its rights there."""
    queue = MessageQueue(place.topic, place.broker, place.queue_id)
    view = QueueView(admin)
    committed, low, high, forbidden = await asyncio.gather(
        attempt(admin.committed_offset(evidence.group, queue)),
        attempt(view.min_offset(admin.full_queue(queue))),
        attempt(view.max_offset(admin.full_queue(queue))),
        attempt(is_forbidden(admin, evidence.group, place.topic, place.broker)),
    )
    evidence = replace(
        evidence, committed=committed, min_offset=low, max_offset=high, forbidden=forbidden
    )
    subscription = evidence.subscription
    sql_matches: Known[bool] | None = None
    if subscription is not None and subscription.kind == SQL92:
        sql_matches = await attempt(_sql_matches(admin, queue, place.offset, subscription))
    lag_ms = None
    if isinstance(committed, int) and isinstance(high, int) and committed < high:
        oldest = await attempt(admin.message_at(queue, committed))
        if isinstance(oldest, ReceivedMessage):
            lag_ms = max(evidence.now_ms - oldest.store_ms, 0)
    return replace(evidence, sql_matches=sql_matches, lag_ms=lag_ms)


async def _route(admin: AsyncAdmin, topic: str, broker: str | None) -> RouteEvidence | None:
    route = await admin.session.find_route(admin.session.with_namespace(topic))
    if route is None:
        return None
    here = [data for data in route.data.queue_datas if broker in (None, data.broker_name)]
    return RouteEvidence(
        brokers=route.brokers,
        readable=any(data.perm & PERM_READ for data in here),
        read_queues=max((data.read_queue_nums for data in here), default=0),
        master=broker is None or MASTER_ID in route.addresses.get(broker, {}),
    )


async def _sql_matches(
    admin: AsyncAdmin, queue: MessageQueue, offset: int, subscription: Subscription
) -> bool:
    """Has the broker filter the message as it does for consumers."""
    full = admin.full_queue(queue)
    wanted = Subscription(full.topic, subscription.expression, SQL92)
    view = QueueView(admin)
    await view.check_filter(wanted)
    pulled = await view.pull(full, offset, 1, wanted)
    return any(message.queue_offset == offset for message in pulled.messages)
