"""Requests that move the role of the master, or ask where the master's HA port is.

NOTIFY_BROKER_ROLE_CHANGED names the broker that becomes the master by its id, with its address and
the number of its epoch. A field of ours says what this replica has to do (`RoleStep`): one that has
another role by now must not take the request for something else. Controllers send the request
without that field, after an election.
"""

from collections.abc import Callable

from penstock.broker.context import BrokerContext
from penstock.broker.replicas.replica_role import RoleChange, RoleStep
from penstock.config.replication_settings import ROLES, check_address
from penstock.errors import InvalidParameter
from penstock.replication.controlled_role import SetState, read_ids
from penstock.rpc.answers import Answer, Reply, WhenDone
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire.bodies.cluster_bodies import SyncStateSet
from penstock.wire.codes import MASTER_ID, RequestCode

MASTER_ROLES = tuple(role for role in ROLES if role != "slave")
EXT_ROLE = "penstockRole"
"""Header field: the role of the new master, sync_master or async_master."""
EXT_STEP = "penstockStep"
"""Header field: a RoleStep."""
EXT_LOG_END = "penstockLogEnd"
"""Header field: where the log of the old master ends."""


class RoleHandlers:
    """NOTIFY_BROKER_ROLE_CHANGED, EXCHANGE_BROKER_HA_INFO."""

    def __init__(self, context: BrokerContext) -> None:
        self._role = context.role
        self._address = context.address
        self._settings = context.settings

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, self.change),
            Row(RequestCode.EXCHANGE_BROKER_HA_INFO, self.ha_info),
        ]

    def change(self, command: Command) -> Answer:
        """Take the role that the request gives to this broker."""
        if EXT_STEP not in command.ext and self._role.learn is not None:
            return self._notified(command, self._role.learn)
        role, address = command.text_or(EXT_ROLE, "sync_master"), command.text("masterAddress")
        if role not in MASTER_ROLES:
            raise InvalidParameter(f"{role!r} is not the role of a master")
        try:
            check_address(address)
        except ValueError as error:
            raise InvalidParameter(f"masterAddress {error}") from None
        try:
            step = RoleStep(command.text(EXT_STEP))
        except ValueError:
            raise InvalidParameter(f"{EXT_STEP} is not a step of a promotion") from None
        change = RoleChange(
            step=step,
            master_id=command.i64("masterBrokerId"),
            master_address=address,
            epoch=command.i32_or("masterEpoch", 0),
            role=role,
            log_end=command.i64_or(EXT_LOG_END, 0),
        )
        if change.master_id <= MASTER_ID:
            raise InvalidParameter("masterBrokerId must be the id of a slave")
        return WhenDone(self._role.change(change), lambda _: Reply())

    def _notified(self, command: Command, learn: Callable[[SetState], None]) -> Answer:
        """A controller says who is the master."""
        body = command.body_as(SyncStateSet) if command.body else SyncStateSet()
        learn(
            SetState(
                command.i64("masterBrokerId"),
                command.text("masterAddress"),
                command.i32("masterEpoch"),
                frozenset(body.sync_state_set),
                max(body.sync_state_set_epoch, command.i32_or("syncStateSetEpoch", 0)),
                master_incomplete=command.truth("penstockMasterIncomplete"),
                taken_over=not command.truth("penstockTakesOver"),
                before=read_ids(command.text_or("penstockBefore")),
            )
        )
        return Reply()

    def ha_info(self, command: Command) -> Answer:
        """Where slaves find the log of this master; nothing at a slave."""
        address = self._role.ha_address
        if self._role.slave or not address:
            return Reply()
        return Reply(
            ext={
                "masterHaAddress": address,
                "masterAddress": self._address,
                "brokerName": self._settings.current.broker.name,
            }
        )
