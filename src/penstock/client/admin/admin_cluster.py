"""Brokers: what they tell about themselves, their settings, whether they take messages."""

from collections.abc import Mapping

from penstock.client.admin.admin_kv import KeyValueAdmin
from penstock.client.admin.admin_values import (
    BrokerAddress,
    BrokerFigures,
    BrokerState,
    ClusterState,
)
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import BrokerStatsData
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import MASTER_ID, RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_nonnegative
from penstock.wire.java_properties import format_properties, parse_properties


class ClusterAdmin(KeyValueAdmin):
    """The part of `AsyncAdmin` about brokers."""

    async def cluster(self, name: str | None = None) -> ClusterState:
        """All brokers with their figures; one that does not answer is there with its problem."""
        brokers = await self.brokers(name)
        states = await self.for_each(brokers, self._state)
        return ClusterState(self.nameservers(), tuple(states))

    async def broker_figures(self, broker_name: str, broker_id: int = MASTER_ID) -> BrokerFigures:
        """What a broker tells about itself."""
        return await self._figures(await self.broker(broker_name, broker_id))

    async def broker_settings(self, broker_name: str, broker_id: int = MASTER_ID) -> dict[str, str]:
        """A broker's settings, in RocketMQ's names."""
        broker = await self.broker(broker_name, broker_id)
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_CONFIG)
        return parse_properties(answer.body)

    async def update_broker_settings(
        self, broker_name: str, changes: Mapping[str, str], broker_id: int = MASTER_ID
    ) -> None:
        """Change settings of a running broker, in RocketMQ's names."""
        broker = await self.broker(broker_name, broker_id)
        body = format_properties(changes)
        await self.ask(broker.address, RequestCode.UPDATE_BROKER_CONFIG, {}, body)

    async def statistics(self, broker_name: str, counter: str, key: str) -> BrokerStatsData | None:
        """One of RocketMQ's counters (TOPIC_PUT_NUMS of a topic, GROUP_GET_NUMS of `topic@group`,
        …) over the last minute, hour and day; None if nothing was counted yet."""
        broker = await self.broker(broker_name)
        answer = await self.ask(
            broker.address,
            RequestCode.VIEW_BROKER_STATS_DATA,
            {"statsName": counter, "statsKey": key},
            good=(ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR),
        )
        if answer.code != ResponseCode.SUCCESS:
            return None
        return fastjson.decode(answer.body, BrokerStatsData)

    async def stop_writes(self, broker_name: str) -> None:
        """Have the NameServers tell producers that this broker takes no messages."""
        fields = {"brokerName": broker_name}
        await self.session.nameservers.call_all(RequestCode.WIPE_WRITE_PERM_OF_BROKER, fields)

    async def allow_writes(self, broker_name: str) -> None:
        """Have the NameServers tell producers that this broker takes messages."""
        fields = {"brokerName": broker_name}
        await self.session.nameservers.call_all(RequestCode.ADD_WRITE_PERM_OF_BROKER, fields)

    async def _state(self, broker: BrokerAddress) -> BrokerState:
        try:
            return BrokerState(broker, await self._figures(broker))
        except PenstockError as error:
            return BrokerState(broker, None, error)

    async def _figures(self, broker: BrokerAddress) -> BrokerFigures:
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return figures_of(fastjson.decode(answer.body, KVTable).table)


def figures_of(table: Mapping[str, str]) -> BrokerFigures:
    """The figures in a broker's answer; what is missing, or is no figure, is None."""
    put = _whole(table, "msgPutTotalTodayNow"), _whole(table, "msgPutTotalTodayMorning")
    got = _whole(table, "msgGetTotalTodayNow"), _whole(table, "msgGetTotalTodayMorning")
    return BrokerFigures(
        version=table.get("brokerVersionDesc"),
        penstock_version=table.get("penstockVersion"),
        started_ms=_whole(table, "bootTimestamp"),
        put_tps=_decimal(table, "putTps"),
        get_tps=_decimal(table, "getTransferredTps"),
        put_today=_difference(*put),
        get_today=_difference(*got),
        put_yesterday=_difference(put[1], _whole(table, "msgPutTotalYesterdayMorning")),
        get_yesterday=_difference(got[1], _whole(table, "msgGetTotalYesterdayMorning")),
        disk_used=_decimal(table, "commitLogDiskRatio"),
        log_begin=_whole(table, "commitLogMinOffset"),
        log_end=_whole(table, "commitLogMaxOffset"),
        earliest_ms=_whole(table, "earliestMessageTimeStamp"),
        raw=dict(table),
    )


def _whole(table: Mapping[str, str], name: str) -> int | None:
    """A whole number; below 0 stands for unknown."""
    return parse_nonnegative(table.get(name, ""))


def _decimal(table: Mapping[str, str], name: str) -> float | None:
    """The first of several numbers: rates come over 10, 60 and 600 seconds."""
    words = table.get(name, "").split()
    try:
        value = float(words[0]) if words else -1.0
    except ValueError:
        return None
    return value if value >= 0 else None


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else max(later - earlier, 0)
