"""The in-sync set of a master, as RocketMQ's tools ask controllers for it.

mqadmin's getSyncStateSet asks the address that it is given for the leader of the controllers, and
the leader for the in-sync sets of brokers. Without a controller the master decides who is in sync,
so it answers both requests for its own broker. A slave names its master as the leader.

The master knows the id of a slave, but not its address for clients: the address shown is the
slave's end of its connection to the HA port. A set has no number of its own.
"""

from penstock.broker.admin.replication_status import NO_EPOCHS
from penstock.broker.context import BrokerContext
from penstock.broker.replicas.replication_state import SlaveState
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_with
from penstock.rpc.router import Row
from penstock.wire.bodies.cluster_bodies import BrokerReplicasInfo, ReplicaIdentity, ReplicasInfo
from penstock.wire.codes import MASTER_ID, RequestCode, ResponseCode


class SyncStateHandlers:
    """CONTROLLER_GET_METADATA_INFO, CONTROLLER_GET_SYNC_STATE_DATA."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.CONTROLLER_GET_METADATA_INFO, self.leader),
            Row(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, self.in_sync),
        ]

    def leader(self, command: Command) -> Answer:
        """Who knows the in-sync set of this broker: its master."""
        role, name = self._context.role, self._context.settings.current.broker.name
        if role.replication().epochs is None:
            return Reply(code=ResponseCode.SYSTEM_ERROR, remark=NO_EPOCHS)
        address = role.master_address if role.slave else self._context.address
        if not address:
            raise role.refusal()
        return Reply(
            ext={
                "group": name,
                "controllerLeaderId": str(MASTER_ID),
                "controllerLeaderAddress": address,
                "isLeader": str(not role.slave).lower(),
                "peers": f"{MASTER_ID}-{address}",
            }
        )

    def in_sync(self, command: Command) -> Answer:
        """The in-sync set of this broker, if the request names it."""
        role, broker = self._context.role, self._context.settings.current.broker
        names = command.body_as(list[str])
        if role.slave:
            raise role.refusal()
        state = role.replication()
        if state.epochs is None:
            return Reply(code=ResponseCode.SYSTEM_ERROR, remark=NO_EPOCHS)
        if broker.name not in names:
            return reply_with(BrokerReplicasInfo())
        address = self._context.address
        master = ReplicaIdentity(
            broker_name=broker.name, broker_id=MASTER_ID, broker_address=address, alive=True
        )
        members, others = [master], list[ReplicaIdentity]()
        for slave in state.slaves:
            (members if slave.in_sync else others).append(_identity(broker.name, slave))
        found = ReplicasInfo(
            master_broker_id=MASTER_ID,
            master_address=address,
            master_epoch=state.epoch or 0,
            in_sync_replicas=members,
            not_in_sync_replicas=others,
        )
        return reply_with(BrokerReplicasInfo(replicas_info_table={broker.name: found}))


def _identity(broker_name: str, slave: SlaveState) -> ReplicaIdentity:
    return ReplicaIdentity(
        broker_name=broker_name,
        broker_id=int(slave.name),
        broker_address=slave.address,
        alive=bool(slave.address),
    )
