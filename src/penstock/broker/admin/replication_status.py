"""The state of replication, for RocketMQ's tools."""

from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.replicas.replication_state import MasterState, SlaveState
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_with
from penstock.rpc.router import Row
from penstock.wire.bodies.cluster_bodies import (
    EpochEntry,
    EpochEntryCache,
    HAClientRuntimeInfo,
    HAConnectionRuntimeInfo,
    HARuntimeInfo,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import LONG_MAX

NO_EPOCHS: Final = "this request only for controllerMode: replication.protocol is static"
"""The first words are Apache's answer."""


class ReplicationHandlers:
    """GET_BROKER_HA_STATUS, GET_BROKER_EPOCH_CACHE."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.GET_BROKER_HA_STATUS, self.status),
            Row(RequestCode.GET_BROKER_EPOCH_CACHE, self.epochs),
        ]

    def status(self, command: Command) -> Answer:
        """The slaves of a master that are connected, or the connection of a slave."""
        state = self._context.role.replication()
        log_end = self._context.store.log.end
        if state.master is not None:
            client = _client_info(state.master, log_end)
            return reply_with(HARuntimeInfo(ha_client_runtime_info=client))
        return reply_with(
            HARuntimeInfo(
                master=not self._context.role.slave,
                master_commit_log_max_offset=log_end,
                in_sync_slave_nums=sum(slave.in_sync for slave in state.slaves),
                ha_connection_info=[
                    _connection_info(slave, log_end) for slave in state.slaves if slave.address
                ],
            )
        )

    def epochs(self, command: Command) -> Answer:
        """The epochs of the log."""
        config = self._context.settings.current.broker
        epochs = self._context.role.replication().epochs
        if epochs is None:
            return Reply(code=ResponseCode.SYSTEM_ERROR, remark=NO_EPOCHS)
        ends = [*(epoch.begin for epoch in epochs[1:]), LONG_MAX]
        return reply_with(
            EpochEntryCache(
                cluster_name=config.cluster,
                broker_name=config.name,
                broker_id=config.id,
                epoch_list=[
                    EpochEntry(epoch=epoch.number, start_offset=epoch.begin, end_offset=end)
                    for epoch, end in zip(epochs, ends, strict=False)
                ],
                max_offset=self._context.store.log.end,
            )
        )


def _connection_info(slave: SlaveState, log_end: int) -> HAConnectionRuntimeInfo:
    return HAConnectionRuntimeInfo(
        addr=slave.address,
        slave_ack_offset=slave.acknowledged,
        diff=log_end - slave.acknowledged,
        in_sync=slave.in_sync,
        transferred_byte_in_second=slave.bytes_per_second,
        transfer_from_where=slave.sent,
    )


def _client_info(master: MasterState, log_end: int) -> HAClientRuntimeInfo:
    return HAClientRuntimeInfo(
        master_addr=master.address,
        transferred_byte_in_second=master.bytes_per_second,
        max_offset=log_end,
        last_read_timestamp=master.read_ms,
        last_write_timestamp=master.written_ms,
    )
