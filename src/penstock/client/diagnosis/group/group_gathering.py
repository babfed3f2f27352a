"""Gathers what is known about a group; concludes nothing."""

import asyncio
from dataclasses import replace

from penstock.client.admin.admin_browse import QueueView
from penstock.client.admin.async_admin import AsyncAdmin, GroupProgress
from penstock.client.diagnosis.cluster_queries import (
    attempt,
    group_settings,
    is_forbidden,
    member_states,
    similar_groups,
)
from penstock.client.diagnosis.group.group_evidence import (
    DeadLetters,
    GroupEvidence,
    WaitingRetries,
)
from penstock.client.diagnosis.message_evidence import MemberState, Unknown
from penstock.errors import GroupNotExist
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

SCAN_MAX = 200
"""Records of delay topics that are read on each broker to count redeliveries."""


async def gather_group(admin: AsyncAdmin, group: str) -> GroupEvidence:
    """All that the cluster tells about a group; raises if no NameServer answers."""
    await admin.brokers()  # without a NameServer nothing can be explained
    settings, members, progress, dead, waiting, without_master = await asyncio.gather(
        attempt(group_settings(admin, group)),
        attempt(admin.members(group)),
        attempt(_progress(admin, group)),
        attempt(_dead_letters(admin, group)),
        attempt(_waiting_retries(admin, group)),
        admin.brokers_without_master(),
    )
    states: tuple[MemberState, ...] = ()
    topics: set[str] = set()
    partial = {f"{name} has no master" for name in without_master}
    if not isinstance(members, Unknown):
        states = await member_states(admin, group, members)
        topics = {s.topic for s in members.subscriptions}
        partial |= {f"{name} can't be reached" for name in members.unreachable}
    if not isinstance(progress, Unknown):
        topics |= {q.queue.topic for q in progress.queues}
    named = sorted(topic for topic in topics if not topic.startswith(RETRY_TOPIC_PREFIX))
    routes = await admin.for_each(named, lambda topic: attempt(_read_queues(admin, topic)))
    read_queues = {
        topic: found
        for topic, found in zip(named, routes, strict=True)
        if not isinstance(found, Unknown)
    }
    partial |= {found.reason for found in routes if isinstance(found, Unknown)}
    evidence = GroupEvidence(
        group=group,
        now_ms=admin.session.clock.now_ms(),
        settings=settings,
        members=members,
        states=states,
        progress=progress,
        dead=dead,
        waiting_retries=waiting,
        read_queues=read_queues,
        forbidden=await _forbidden(admin, group, read_queues),
        ends={},
        partial=tuple(sorted(partial)),
        similar=await similar_groups(admin, group, settings),
    )
    return await _with_ends(admin, evidence) if evidence.broadcast else evidence


async def _progress(admin: AsyncAdmin, group: str) -> GroupProgress:
    try:
        return await admin.progress(group)
    except GroupNotExist:
        return GroupProgress(group, (), 0.0)


async def _dead_letters(admin: AsyncAdmin, group: str) -> DeadLetters:
    topic = DLQ_TOPIC_PREFIX + group
    if await admin.session.find_route(admin.session.with_namespace(topic)) is None:
        return DeadLetters(0, None)
    queues = (await admin.describe_topic(topic)).queues
    times = [q.updated_ms for q in queues if q.updated_ms and q.count]
    return DeadLetters(sum(q.count for q in queues), max(times, default=None))


async def _waiting_retries(admin: AsyncAdmin, group: str) -> WaitingRetries:
    """The redeliveries in the delay topics, of which the first records are read."""
    topic = RETRY_TOPIC_PREFIX + group
    found = await admin.scheduled(topic=topic, count_max=SCAN_MAX, scan_max=SCAN_MAX)
    return WaitingRetries(len(found.messages), bool(found.partial or found.unreachable))


async def _read_queues(admin: AsyncAdmin, topic: str) -> tuple[MessageQueue, ...] | None:
    route = await admin.session.find_route(admin.session.with_namespace(topic))
    return None if route is None else tuple(map(admin.bare_queue, route.read_queues))


async def _forbidden(
    admin: AsyncAdmin, group: str, topics: dict[str, tuple[MessageQueue, ...] | None]
) -> tuple[str, ...]:
    """The topics that the group is forbidden to read; what is not known is not listed."""
    places = sorted({(q.topic, q.broker_name) for queues in topics.values() for q in queues or ()})

    async def ask(place: tuple[str, str]) -> bool:
        return await attempt(is_forbidden(admin, group, *place)) is True

    answers = await admin.for_each(places, ask)
    return tuple(f"{t} on {b}" for (t, b), no in zip(places, answers, strict=True) if no)


async def _with_ends(admin: AsyncAdmin, evidence: GroupEvidence) -> GroupEvidence:
    """The ends of the queues: brokers have no progress of a broadcast group."""
    queues = [q for part in evidence.read_queues.values() for q in part or ()]
    view = QueueView(admin)
    found = await admin.for_each(
        queues, lambda queue: attempt(view.max_offset(admin.full_queue(queue)))
    )
    ends = {q: end for q, end in zip(queues, found, strict=True) if isinstance(end, int)}
    return replace(evidence, ends=ends)
