"""Brokers: runtime information, settings, write permission."""

from collections.abc import Mapping

from penstock.client.admin.admin_kv import KeyValueAdmin
from penstock.client.admin.admin_values import (
    BrokerAddress,
    BrokerRuntimeInfo,
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
        """All brokers with their runtime information, or the error of the request."""
        brokers = await self.brokers(name)
        states = await self.for_each(brokers, self._state)
        return ClusterState(self.nameservers(), tuple(states))

    async def broker_runtime_info(
        self, broker_name: str, broker_id: int = MASTER_ID
    ) -> BrokerRuntimeInfo:
        """The runtime information of a broker."""
        return await self._runtime_info(await self.broker(broker_name, broker_id))

    broker_figures = broker_runtime_info  # the name before 0.1.0 was released

    async def broker_settings(self, broker_name: str, broker_id: int = MASTER_ID) -> dict[str, str]:
        """The settings of a broker, by RocketMQ's names."""
        broker = await self.broker(broker_name, broker_id)
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_CONFIG)
        return parse_properties(answer.body)

    async def update_broker_settings(
        self, broker_name: str, changes: Mapping[str, str], broker_id: int = MASTER_ID
    ) -> None:
        """Change settings of a running broker, by RocketMQ's names."""
        broker = await self.broker(broker_name, broker_id)
        body = format_properties(changes)
        await self.ask(broker.address, RequestCode.UPDATE_BROKER_CONFIG, {}, body)

    async def statistics(self, broker_name: str, counter: str, key: str) -> BrokerStatsData | None:
        """One of RocketMQ's counters (TOPIC_PUT_NUMS of a topic, GROUP_GET_NUMS of `topic@group`,
        …) over the last minute, hour and day; None if it has not counted anything yet."""
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
        """Remove the broker's write permission from the routes, so that producers avoid it."""
        fields = {"brokerName": broker_name}
        await self.session.nameservers.call_all(RequestCode.WIPE_WRITE_PERM_OF_BROKER, fields)

    async def allow_writes(self, broker_name: str) -> None:
        """Restore the broker's write permission in the routes."""
        fields = {"brokerName": broker_name}
        await self.session.nameservers.call_all(RequestCode.ADD_WRITE_PERM_OF_BROKER, fields)

    async def _state(self, broker: BrokerAddress) -> BrokerState:
        try:
            return BrokerState(broker, await self._runtime_info(broker))
        except PenstockError as error:
            return BrokerState(broker, None, error)

    async def _runtime_info(self, broker: BrokerAddress) -> BrokerRuntimeInfo:
        answer = await self.ask(broker.address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return read_runtime_info(fastjson.decode(answer.body, KVTable).table)


def read_runtime_info(table: Mapping[str, str]) -> BrokerRuntimeInfo:
    """The runtime information in a response; a missing or malformed value is None."""
    put = _whole(table, "msgPutTotalTodayNow"), _whole(table, "msgPutTotalTodayMorning")
    got = _whole(table, "msgGetTotalTodayNow"), _whole(table, "msgGetTotalTodayMorning")
    return BrokerRuntimeInfo(
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
    """A whole number; brokers report a negative one if it is unknown."""
    return parse_nonnegative(table.get(name, ""))


def _decimal(table: Mapping[str, str], name: str) -> float | None:
    """The first of several numbers: rates are over 10, 60 and 600 seconds."""
    words = table.get(name, "").split()
    try:
        value = float(words[0]) if words else -1.0
    except ValueError:
        return None
    return value if value >= 0 else None


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else max(later - earlier, 0)
