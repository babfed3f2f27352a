"""Applies the plan of an import, item by item. A failure does not stop the others."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cli.definitions.collect import rules_of, topic_on_broker, users_of
from penstock.cli.definitions.import_plan import Item, Present
from penstock.cli.group.group_text import group_json
from penstock.cli.schemas.definitions_output import DefinedOffset, DefinedRule, Definitions
from penstock.cli.schemas.group_output import GroupOnBroker
from penstock.cli.schemas.topic_output import TopicOnBroker
from penstock.client.admin.admin_values import TopicKind
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.bodies.cluster_bodies import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from penstock.wire.codes import RequestCode

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import AsyncAdmin, ResetPlan

Tell = Callable[[str, int, int], None]


async def read_present(
    admin: "AsyncAdmin", cluster: str | None, wanted: Definitions, *, access: bool
) -> Present:
    """What the cluster has now; raises if a broker can't be reached."""
    masters = await admin.masters(cluster)
    for master in masters:
        await admin.ask(master.address, RequestCode.GET_BROKER_RUNTIME_INFO)
    addresses = [broker.address for broker in await admin.brokers(cluster)] if access else []
    topics = await admin.topics(kind=TopicKind.NORMAL, cluster=cluster)
    return Present(
        brokers=[master.name for master in masters],
        topics={
            info.name: {name: topic_on_broker(one) for name, one in info.brokers.items()}
            for info in topics
        },
        groups={
            info.name: group_json(info).brokers for info in await admin.groups(cluster=cluster)
        },
        users={
            address: {info.username or "": info for info in await users_of(admin, address)}
            for address in addresses
        },
        rules={address: await rules_of(admin, address) for address in addresses},
        kv={namespace: await admin.kv_table(namespace) for namespace in wanted.kv},
    )


async def apply_items(
    admin: "AsyncAdmin", items: Sequence[Item], tell: Tell
) -> dict[Item, PenstockError]:
    """Apply all changes; the errors of those that failed."""
    changes = [item for item in items if item.is_change]
    failed: dict[Item, PenstockError] = {}
    for count, item in enumerate(changes):
        tell("import", count, len(changes))
        try:
            await _apply(admin, item)
        except PenstockError as error:
            failed[item] = error
    return failed


async def _apply(admin: "AsyncAdmin", item: Item) -> None:
    value = item.value
    if isinstance(value, TopicOnBroker):
        await _put_topic(admin, item, value)
    elif isinstance(value, GroupOnBroker):
        settings: Any = msgspec.structs.asdict(value)
        del settings["attributes"]
        await admin.create_group(item.name, brokers=[item.where], **settings)
    elif isinstance(value, UserInfo):
        code = RequestCode.AUTH_CREATE_USER
        if item.change == "change":
            code = RequestCode.AUTH_UPDATE_USER
        await admin.ask(item.where, code, {"username": item.name}, fastjson.encode(value))
    elif isinstance(value, DefinedRule):
        await _put_rule(admin, item.where, value)
    else:
        namespace, _, key = item.name.partition("/")
        await admin.put_kv(namespace, key, str(value))


async def _put_topic(admin: "AsyncAdmin", item: Item, wanted: TopicOnBroker) -> None:
    attributes: dict[str, str | None] = {**dict.fromkeys(item.removed), **wanted.attributes}
    await admin.create_topic(
        item.name,
        read_queues=wanted.read_queues,
        write_queues=wanted.write_queues,
        perm=wanted.perm,
        order=wanted.order,
        attributes=attributes,
        brokers=[item.where],
    )


async def _put_rule(admin: "AsyncAdmin", address: str, rule: DefinedRule) -> None:
    entry = PolicyEntryInfo(
        resource=rule.resource,
        actions=rule.actions,
        source_ips=rule.sources or None,
        decision=rule.decision,
    )
    subject = f"User:{rule.user}"
    info = AclInfo(subject=subject, policies=[PolicyInfo(policy_type=rule.policy, entries=[entry])])
    body = fastjson.encode(info)
    await admin.ask(address, RequestCode.AUTH_UPDATE_ACL, {"subject": subject}, body)


# --- offsets, which are planned when topics and groups exist


async def plan_offsets(
    admin: "AsyncAdmin", wanted: Sequence[DefinedOffset]
) -> "tuple[list[Item], list[ResetPlan]]":
    """The items of the offsets, and the plans that set those that differ."""
    by_group: dict[tuple[str, str], dict[MessageQueue, int]] = defaultdict(dict)
    for one in wanted:
        queue = MessageQueue(one.topic, one.broker, one.queue)
        by_group[one.group, one.topic][queue] = one.offset
    items: list[Item] = []
    plans = []
    for (group, topic), targets in by_group.items():
        try:
            fitting, skipped = await _fitting(admin, group, topic, targets)
            items += skipped
            if not fitting:
                continue
            plan = await admin.plan_reset(group, topic, fitting)
        except PenstockError as error:
            items.append(Item("offset", f"{group} {topic}", "-", "skip", str(error)))
            continue
        moves = tuple(move for move in plan.moves if move.old != move.new)
        unchanged = {move.queue for move in plan.moves} - {move.queue for move in moves}
        items += [Item("offset", _name(group, q), q.broker_name, "unchanged") for q in unchanged]
        items += [
            Item(
                "offset",
                _name(group, move.queue),
                move.queue.broker_name,
                "create" if move.old is None else "change",
                str(move.new) if move.old is None else f"{move.old} → {move.new}",
            )
            for move in moves
        ]
        if moves:
            plans.append(replace(plan, moves=moves))
    return items, plans


async def _fitting(
    admin: "AsyncAdmin", group: str, topic: str, targets: Mapping[MessageQueue, int]
) -> tuple[dict[MessageQueue, int], list[Item]]:
    """The offsets that exist in the queues of the cluster, and items for the others."""
    ends = {state.queue: state for state in (await admin.describe_topic(topic)).queues}
    fitting, skipped = {}, []
    for queue, offset in targets.items():
        end = ends.get(queue)
        if end is not None and end.min_offset <= offset <= end.max_offset:
            fitting[queue] = offset
            continue
        why = "there is no such queue"
        if end is not None:
            why = f"offset {offset} is not between {end.min_offset} and {end.max_offset}"
        skipped.append(Item("offset", _name(group, queue), queue.broker_name, "skip", why))
    return fitting, skipped


def _name(group: str, queue: MessageQueue) -> str:
    return f"{group} {queue.topic}/{queue.queue_id}"


async def apply_offsets(
    admin: "AsyncAdmin", items: Sequence[Item], plans: "Sequence[ResetPlan]"
) -> dict[Item, PenstockError]:
    """Set the offsets; the errors of those that failed."""
    failed: dict[Item, PenstockError] = {}
    by_name = {(item.name, item.where): item for item in items if item.is_change}
    for plan in plans:
        try:
            problems = dict((await admin.apply_reset(plan)).failed)
        except PenstockError as error:
            problems = dict.fromkeys(plan.moves, error)
        for move, problem in problems.items():
            failed[by_name[_name(plan.group, move.queue), move.queue.broker_name]] = problem
    return failed
