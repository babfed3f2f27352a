"""Queries of the cluster that messages and groups share; a query may fail without ending all."""

from collections.abc import Awaitable, Mapping
from typing import TypeVar

from penstock.client.admin.async_admin import AsyncAdmin, GroupMembers, GroupSettings
from penstock.client.consumer.broker_requests import QUEUE_FIELDS, queue_field
from penstock.client.consumer.subscription import Subscription
from penstock.client.diagnosis.message_evidence import (
    Known,
    MemberState,
    QueueStateOfMember,
    Unknown,
)
from penstock.client.diagnosis.wording import similar_text
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerRunningInfo, GroupForbidden
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RequestCode
from penstock.wire.java_numbers import parse_nonnegative

T = TypeVar("T")

MEMBERS_MAX = 100
"""Members that are queried: a broker forwards each request to the member."""


async def attempt(work: Awaitable[T]) -> Known[T]:
    """The result, or why it is not known."""
    try:
        return await work
    except PenstockError as error:
        return Unknown(error.message)


async def group_settings(admin: AsyncAdmin, group: str) -> dict[str, GroupSettings]:
    """The settings of a group by broker; empty if it does not exist."""
    groups = await admin.groups(system=True)
    return next((dict(info.brokers) for info in groups if info.name == group), {})


async def similar_groups(admin: AsyncAdmin, group: str, settings: Known[object]) -> str:
    """Groups with similar names, as text, if no broker has the group."""
    if isinstance(settings, Unknown) or settings:
        return ""
    groups = await attempt(admin.groups())
    names = () if isinstance(groups, Unknown) else [info.name for info in groups]
    return similar_text("groups", group, names)


async def is_forbidden(admin: AsyncAdmin, group: str, topic: str, broker_name: str) -> bool:
    """Whether a broker forbids a group to read a topic."""
    broker = await admin.broker(broker_name)
    full = admin.session.with_namespace
    fields = {"group": full(group), "topic": full(topic)}
    code = RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN
    answer = await admin.ask(broker.address, code, fields)
    return fastjson.decode(answer.body, GroupForbidden).readable is False


async def member_states(
    admin: AsyncAdmin, group: str, members: GroupMembers
) -> tuple[MemberState, ...]:
    """What each member reports; those beyond MEMBERS_MAX count as not answering."""

    async def one(client_id: str) -> MemberState:
        try:
            info = await admin.running_info(group, client_id)
        except PenstockError as error:
            return MemberState(client_id, error.message)
        return _state(admin, client_id, info)

    ids = [member.client_id for member in members.members]
    asked = await admin.for_each(ids[:MEMBERS_MAX], one)
    rest = [MemberState(client_id, "it was not asked") for client_id in ids[MEMBERS_MAX:]]
    return (*asked, *rest)


def _state(admin: AsyncAdmin, client_id: str, info: ConsumerRunningInfo) -> MemberState:
    bare = admin.session.without_namespace
    queues = {
        admin.bare_queue(queue): _queue(queue, info.user_consumer_info, info)
        for queue in (*info.mq_table, *info.mq_pop_table)
    }
    return MemberState(
        client_id=client_id,
        subscriptions=tuple(
            Subscription(bare(data.topic), data.sub_string or "", data.expression_type)
            for data in info.subscription_set
        ),
        queues=queues,
        orderly=info.properties.get("PROP_CONSUMEORDERLY") == "true",
        started_ms=parse_nonnegative(info.properties.get("PROP_CONSUMER_START_TIMESTAMP", "")),
    )


def _queue(
    queue: MessageQueue, reported: Mapping[str, str], info: ConsumerRunningInfo
) -> QueueStateOfMember:
    since, paused, failure = (reported.get(queue_field(name, queue)) for name in QUEUE_FIELDS)
    known = queue_field(QUEUE_FIELDS[1], queue) in reported
    return QueueStateOfMember(
        info=info.mq_table.get(queue),
        in_work_since_ms=None if since is None else parse_nonnegative(since),
        paused=(paused == "true") if known else None,
        failure=failure,
    )
