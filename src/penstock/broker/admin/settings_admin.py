"""Settings over the wire, and requests about machinery of RocketMQ that a Penstock broker lacks."""

import logging

from penstock.broker.context import BrokerContext
from penstock.errors import Refused
from penstock.rpc.answers import REGISTER_MS, Answer, InThread, RegisterTopics, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import Handler, Row
from penstock.wire import fastjson
from penstock.wire.codes import RequestCode
from penstock.wire.java_properties import format_properties, parse_properties

log = logging.getLogger(__name__)

_COLD = (
    "reads of old messages are not limited by group here: they run in threads of their own and do "
    "not slow others down"
)
_ROCKSDB = "this broker keeps no RocksDB: queues and tables are in RocketMQ's files"
ABSENT = {
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    RequestCode.SET_COMMITLOG_READ_MODE: "the kernel reads ahead as it sees fit: there is no mode",
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _ROCKSDB,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON: _ROCKSDB,
    RequestCode.SWITCH_TIMER_ENGINE: "there is only one engine for timers: nothing to switch",
}
"""Requests that can't mean anything here, and why."""


class SettingsHandlers:
    """UPDATE_BROKER_CONFIG, GET_BROKER_CONFIG, cold data, RocksDB."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.UPDATE_BROKER_CONFIG, self.change),
            Row(RequestCode.GET_BROKER_CONFIG, self.show),
            Row(RequestCode.GET_COLD_DATA_FLOW_CTR_INFO, self.cold_data),
            *(Row(code, _refuse(why)) for code, why in ABSENT.items()),
        ]

    def change(self, command: Command) -> Answer:
        """Change settings that may be changed while the broker runs: all of them or none."""
        changed = self._context.settings.change(parse_properties(command.body))
        if not changed:
            return Reply()
        log.info("%s has changed %s", command.peer, ", ".join(changed))
        self._context.changed_settings.set(self._context.settings.changed, command.now_ms)
        known: Answer = Reply()
        if "broker.permission" in changed:
            known = RegisterTopics(Reply, command.now_ms + REGISTER_MS)
        return InThread(
            self._context.persistence.save(self._context.changed_settings), lambda _: known
        )

    def show(self, command: Command) -> Answer:
        """All settings, as lines of a broker.conf."""
        return Reply(
            ext={"version": fastjson.encode(self._context.changed_settings.version).decode()},
            body=format_properties(self._context.settings.apache_values()),
        )

    def cold_data(self, command: Command) -> Answer:
        """Groups whose reads of old messages are limited: none."""
        tables: dict[str, dict[str, int]] = {"runtimeTable": {}, "configTable": {}}
        return Reply(body=fastjson.encode(tables))


def _refuse(why: str) -> Handler:
    def handler(command: Command) -> Answer:
        raise Refused(why, hint="")

    return handler
