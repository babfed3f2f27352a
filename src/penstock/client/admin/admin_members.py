"""Connected clients: the members of consumer groups, and producers."""

from collections.abc import Iterable, Sequence

from penstock.client.admin.admin_core import AdminCore, BrokerResults
from penstock.client.admin.admin_values import BrokerAddress, GroupMembers, Member
from penstock.client.consumer.subscription import Subscription
from penstock.errors import ConsumerNotOnline
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    Connection,
    ConsumerConnection,
    ConsumerRunningInfo,
    ProducerConnection,
    ProducerTableInfo,
)
from penstock.wire.codes import V4_1_0_SNAPSHOT, RequestCode, ResponseCode

RELAY_MS = 15_000
"""Timeout of requests that a broker forwards to a consumer: the broker waits up to 10 s."""
_ONLINE = (ResponseCode.SUCCESS, ResponseCode.CONSUMER_NOT_ONLINE)
_PRODUCING = (ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR)


class MemberAdmin(AdminCore):
    """The part of `AsyncAdmin` about connected clients."""

    async def members(self, group: str) -> GroupMembers:
        """The connected clients of a group, if any, and their subscriptions."""
        found = await self._connections(await self.masters(), self.session.with_namespace(group))
        tables = [(broker, table) for broker, table in found.items if table is not None]
        subscriptions = {
            data.topic: Subscription(
                self.session.without_namespace(data.topic),
                data.sub_string or "",
                data.expression_type,
                data.sub_version,
            )
            for _, table in tables
            for data in table.subscription_table.values()
        }
        first = tables[0][1] if tables else ConsumerConnection()
        return GroupMembers(
            group=group,
            members=_members([(broker, table.connection_set) for broker, table in tables]),
            subscriptions=tuple(subscriptions[topic] for topic in sorted(subscriptions)),
            model=first.message_model,
            consume_type=first.consume_type,
            start_at=first.consume_from_where,
            unreachable=found.unreachable,
        )

    async def producers(self, group: str) -> tuple[Member, ...]:
        """The connected producers of a group, if any."""
        fields = {"producerGroup": self.session.with_namespace(group)}
        found = await self.ask_each(
            await self.masters(), RequestCode.GET_PRODUCER_CONNECTION_LIST, fields, good=_PRODUCING
        )
        return _members(
            [
                (broker, fastjson.decode(answer.body, ProducerConnection).connection_set)
                for broker, answer in found.items
                if answer.code == ResponseCode.SUCCESS
            ]
        )

    async def producer_groups(self) -> dict[str, tuple[str, ...]]:
        """The client ids of all connected producers, by group."""
        found = await self.ask_each(await self.masters(), RequestCode.GET_ALL_PRODUCER_INFO)
        groups: dict[str, set[str]] = {}
        for _, answer in found.items:
            for name, infos in fastjson.decode(answer.body, ProducerTableInfo).data.items():
                if self.is_ours(name):
                    ids = groups.setdefault(self.session.without_namespace(name), set())
                    ids |= {info.client_id or "" for info in infos}
        return {name: tuple(sorted(ids)) for name, ids in sorted(groups.items())}

    async def running_info(
        self, group: str, client_id: str, *, stacks: bool = False
    ) -> ConsumerRunningInfo:
        """The running info of a consumer: its queues, their state and rates, its settings."""
        fields = {
            "consumerGroup": self.session.with_namespace(group),
            "clientId": client_id,
            "jstackEnable": "true" if stacks else "false",
        }
        address = await self._broker_of_member(group, client_id)
        answer = await self.ask(
            address, RequestCode.GET_CONSUMER_RUNNING_INFO, fields, timeout_ms=RELAY_MS
        )
        return fastjson.decode(answer.body, ConsumerRunningInfo)

    # --- private

    async def _connections(
        self, brokers: Sequence[BrokerAddress], name: str
    ) -> BrokerResults[ConsumerConnection | None]:
        """The connections of a group at each broker; None without any."""
        found = await self.ask_each(
            brokers,
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            {"consumerGroup": name},
            good=_ONLINE,
        )
        return BrokerResults(
            [
                (
                    broker,
                    fastjson.decode(answer.body, ConsumerConnection)
                    if answer.code == ResponseCode.SUCCESS
                    else None,
                )
                for broker, answer in found.items
            ],
            found.unreachable,
        )

    async def _broker_of_member(self, group: str, client_id: str) -> str:
        """The address of a broker that the client is connected to; raises ConsumerNotOnline."""
        found = await self._connections(await self.masters(), self.session.with_namespace(group))
        for broker, table in found.items:
            if table is not None and client_id in {c.client_id for c in table.connection_set}:
                return broker.address
        raise ConsumerNotOnline(
            f"the client {client_id} of the group {group} is not connected to any broker",
            hint="members() lists the connected clients",
        )


def version_text(version: int) -> str:
    """The version of a client, from RocketMQ's number of it."""
    number, is_release = divmod(version - V4_1_0_SNAPSHOT, 2)
    if number < 0:
        return f"before 4.1 ({version})"
    major, rest = (4, number + 10) if number < 90 else (5, number - 90)
    return f"{major}.{rest // 10}.{rest % 10}" + ("" if is_release else "-SNAPSHOT")


def _members(found: Iterable[tuple[BrokerAddress, Iterable[Connection]]]) -> tuple[Member, ...]:
    brokers: dict[str, list[str]] = {}
    members: dict[str, Connection] = {}
    for broker, connections in found:
        for connection in connections:
            client_id = connection.client_id or ""
            members[client_id] = connection
            brokers.setdefault(client_id, []).append(broker.name)
    return tuple(
        Member(
            client_id=client_id,
            address=connection.client_addr or "",
            language=connection.language or "",
            version=connection.version,
            version_text=version_text(connection.version),
            brokers=tuple(brokers[client_id]),
        )
        for client_id, connection in sorted(members.items())
    )
