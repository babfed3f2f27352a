"""Reads the definitions of a cluster.

Topics and groups of RocketMQ itself, retry topics and dead letter topics are left out: brokers
create them. Users and rules are read from the first broker that answers; on brokers that belong
together they are the same.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.cli.group.group_text import group_json
from penstock.cli.schemas.definitions_output import (
    VERSION,
    DefinedGroup,
    DefinedOffset,
    DefinedRule,
    DefinedTopic,
    DefinedUser,
    Definitions,
)
from penstock.cli.schemas.topic_output import TopicOnBroker
from penstock.client.admin.admin_topics import ORDER_NAMESPACE
from penstock.client.admin.admin_values import TopicKind, TopicSettings
from penstock.errors import PenstockError
from penstock.plurals import count_text
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import AclInfo, UserInfo
from penstock.wire.codes import RETRY_TOPIC_PREFIX, RequestCode

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin

Tell = Callable[[str, int, int], None]


async def collect(
    admin: "AsyncAdmin",
    cluster: str | None,
    *,
    kv_namespaces: Sequence[str],
    secrets: bool,
    offsets: bool,
    tell: Tell,
) -> Definitions:
    """All definitions; raises if a broker can't be reached, because the file would lack its own."""
    masters = await admin.masters(cluster)
    for master in masters:  # `topics` and `groups` would only log it
        await admin.ask(master.address, RequestCode.GET_BROKER_RUNTIME_INFO)
    groups = await admin.groups(cluster=cluster)
    notes: list[str] = []
    users, rules = await collect_access(admin, masters[0].address, notes, secrets=secrets)
    found: list[DefinedOffset] = []
    if offsets:
        found = await collect_offsets(admin, [info.name for info in groups], tell)
    namespaces = (ORDER_NAMESPACE, *kv_namespaces)
    kv = {namespace: await admin.kv_table(namespace) for namespace in namespaces}
    return Definitions(
        format="penstock-definitions",
        version=VERSION,
        exported_ms=time.time_ns() // 1_000_000,
        nameservers=list(admin.nameservers()),
        brokers=[master.name for master in masters],
        topics=[
            DefinedTopic(
                topic=info.name,
                brokers={name: topic_on_broker(one) for name, one in info.brokers.items()},
            )
            for info in await admin.topics(kind=TopicKind.NORMAL, cluster=cluster)
        ],
        groups=[DefinedGroup(group=one.name, brokers=group_json(one).brokers) for one in groups],
        users=users,
        rules=rules,
        kv={namespace: table for namespace, table in kv.items() if table},
        offsets=found,
        notes=notes,
    )


def topic_on_broker(settings: TopicSettings) -> TopicOnBroker:
    """The settings of a topic on one broker."""
    return TopicOnBroker(
        read_queues=settings.read_queues,
        write_queues=settings.write_queues,
        perm=settings.perm_text,
        order=settings.order,
        type=settings.message_type,
        attributes=dict(settings.attributes),
    )


async def collect_access(
    admin: "AsyncAdmin", address: str, notes: list[str], *, secrets: bool
) -> tuple[list[DefinedUser], list[DefinedRule]]:
    """Users and rules of one broker; a note says why there are none."""
    try:
        users = await users_of(admin, address)
        rules = await rules_of(admin, address)
    except PenstockError as error:
        notes.append(f"users and rules: {error}")
        return [], []
    defined = [
        DefinedUser(
            user=info.username or "",
            type=info.user_type or "Normal",
            status=info.user_status or "enable",
            password=(info.password or None) if secrets else None,
        )
        for info in users
    ]
    missing = sum(one.password is None for one in defined)
    if secrets and missing:
        notes.append(f"the broker did not tell the passwords of {count_text(missing, 'user')}")
    return defined, rules


async def users_of(admin: "AsyncAdmin", address: str) -> list[UserInfo]:
    """The users of a broker."""
    answer = await admin.ask(address, RequestCode.AUTH_LIST_USER)
    return fastjson.decode(answer.body, list[UserInfo]) if answer.body else []


async def rules_of(admin: "AsyncAdmin", address: str) -> list[DefinedRule]:
    """The access rules of a broker."""
    answer = await admin.ask(address, RequestCode.AUTH_LIST_ACL)
    acls = fastjson.decode(answer.body, list[AclInfo]) if answer.body else []
    return [
        DefinedRule(
            user=(info.subject or "").removeprefix("User:"),
            policy=policy.policy_type or "Custom",
            resource=entry.resource or "",
            actions=list(entry.actions or []),
            sources=list(entry.source_ips or []),
            decision=entry.decision or "",
        )
        for info in acls
        for policy in info.policies or []
        for entry in policy.entries or []
    ]


async def collect_offsets(
    admin: "AsyncAdmin", groups: Sequence[str], tell: Tell
) -> list[DefinedOffset]:
    """The committed offsets of groups, without those in retry topics."""
    found = []
    for count, group in enumerate(groups):
        tell("offsets", count, len(groups))
        for at in (await admin.progress(group)).queues:
            if at.committed is not None and not at.queue.topic.startswith(RETRY_TOPIC_PREFIX):
                queue = at.queue
                found.append(
                    DefinedOffset(
                        group=group,
                        topic=queue.topic,
                        broker=queue.broker_name,
                        queue=queue.queue_id,
                        offset=at.committed,
                    )
                )
    return found
