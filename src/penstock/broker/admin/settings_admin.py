"""Requests for settings, and requests for parts of RocketMQ that Penstock does not have."""

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
    "reads of old messages are not limited by group: they run in a thread pool and do not delay "
    "other requests"
)
_ROCKSDB = "this broker does not use RocksDB: queues and tables are in RocketMQ's files"
UNSUPPORTED = {
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: _COLD,
    RequestCode.SET_COMMITLOG_READ_MODE: "the operating system decides how the log is read",
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _ROCKSDB,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON: _ROCKSDB,
    RequestCode.SWITCH_TIMER_ENGINE: "there is only one timer engine",
}
"""Requests that are not supported, with the reason."""


class SettingsHandlers:
    """UPDATE_BROKER_CONFIG, GET_BROKER_CONFIG, cold data, RocksDB."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.UPDATE_BROKER_CONFIG, self.update),
            Row(RequestCode.GET_BROKER_CONFIG, self.get),
            Row(RequestCode.GET_COLD_DATA_FLOW_CTR_INFO, self.cold_data),
            *(Row(code, _refuse(why)) for code, why in UNSUPPORTED.items()),
        ]

    def update(self, command: Command) -> Answer:
        """Change live settings: all of them or, if one is not valid, none."""
        changed = self._context.settings.change(parse_properties(command.body))
        if not changed:
            return Reply()
        log.info("changed settings %s (by %s)", ", ".join(changed), command.peer)
        self._context.changed_settings.set(self._context.settings.changed, command.now_ms)
        reply: Answer = Reply()
        if "broker.permission" in changed:
            reply = RegisterTopics(Reply, command.now_ms + REGISTER_MS)
        return InThread(
            self._context.persistence.save(self._context.changed_settings), lambda _: reply
        )

    def get(self, command: Command) -> Answer:
        """All settings, in the form of a broker.conf."""
        return Reply(
            ext={"version": fastjson.encode(self._context.changed_settings.version).decode()},
            body=format_properties(self._context.settings.apache_values()),
        )

    def cold_data(self, command: Command) -> Answer:
        """Groups with limited reads of old messages: none."""
        tables: dict[str, dict[str, int]] = {"runtimeTable": {}, "configTable": {}}
        return Reply(body=fastjson.encode(tables))


def _refuse(why: str) -> Handler:
    def handler(command: Command) -> Answer:
        raise Refused(why, hint="")

    return handler
