"""Changes the role of a running broker.

A promotion goes through the steps of `RoleStep`. The new role is saved first. Then the services of
the broker are stopped and started again in that role, without ending the process: the store is
closed and flushed in between.

1. The master refuses messages and changes of tables. It asks the slave to prepare itself, saves its
   new role, and becomes a slave. If the slave is not prepared in time, it goes on as the master.
2. To prepare itself, the slave waits until it has the log up to the master's end, flushes it, and
   copies the tables once more. It also checks that its settings allow the role.
3. The slave saves its new role and becomes the master. It refuses to while the old master is
   connected: then that one has not stepped down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker.replicas.replica_role import RoleChange, RoleStep
from penstock.clock import Clock, finish_within, pause
from penstock.config.settings import contradiction, ha_port
from penstock.errors import InvalidParameter, NotMaster, PenstockError, Refused, WriteStopped
from penstock.errors import refusal as refusal_of
from penstock.replication.assigned_role import AssignedRole, save_assigned_role
from penstock.server.background import in_pool
from penstock.wire.codes import MASTER_ID, RequestCode, ResponseCode

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.config import LiveSettings, Settings
    from penstock.server.replication.replication import Replication

log = logging.getLogger(__name__)

PREPARE_MS = 5_000
"""How long a slave may take to have the log and the tables of the master that steps down."""
STEP_DOWN_MS = PREPARE_MS + 1_000
DISCONNECT_MS = 5_000
"""How long a slave waits until the old master has closed its connection."""
POLL_MS = 5
EPOCHS_SKIPPED_MAX = 1_000_000
"""By how much the number of an epoch may grow: the last possible one would end all promotions."""


class RoleChanges:
    """The changes of one broker's role; one at a time."""

    def __init__(
        self,
        settings: LiveSettings,
        configured: Settings,
        broker: Broker,
        replication: Replication,
        clock: Clock,
        restart: Callable[[], None],
    ) -> None:
        """`configured` are the settings without an assigned role. `restart` stops the services and
        starts them again, not before the caller has returned."""
        self._settings = settings
        self._configured = configured
        self._role = broker.role
        self._store = broker.context.store
        self._address = broker.context.address
        self._replication = replication
        self._clock = clock
        self._restart = restart
        self._changing = False

    def change(self, change: RoleChange) -> asyncio.Future[None]:
        """Begin a change; the future is done when the step is done, or fails."""
        return asyncio.ensure_future(self._change(change))

    async def _change(self, change: RoleChange) -> None:
        step = {
            RoleStep.STEP_DOWN: self._step_down,
            RoleStep.PREPARE: self._prepare,
            RoleStep.TAKE_OVER: self._take_over,
            RoleStep.FOLLOW: self._follow,
        }[change.step]
        self._check(change)
        if self._changing:
            raise Refused("the role of this broker is being changed already")
        self._changing = True
        try:
            restarts = await step(change)
        except BaseException:
            self._changing = False
            raise
        if restarts:
            self._restart()  # and no further change until then
        else:
            self._changing = False

    def _check(self, change: RoleChange) -> None:
        """Refuse a request that was meant for another role, or comes too late."""
        config = self._settings.current
        slave = config.replication.role == "slave"
        if slave == (change.step is RoleStep.STEP_DOWN):
            raise Refused(
                f"this broker is {'a slave' if slave else 'the master'} now",
                hint="look at `penstock cluster status`, and decide again",
            )
        promoted = change.step in (RoleStep.PREPARE, RoleStep.TAKE_OVER)
        if promoted != (slave and change.master_id == config.broker.id):
            raise Refused(f"the id of this broker is {config.broker.id}, not {change.master_id}")
        if not slave and change.master_address == self._address:
            raise Refused("this broker is the master already")
        if config.replication.protocol == "static":
            return
        newest = self._replication.newest_epoch
        if not newest < change.epoch <= newest + EPOCHS_SKIPPED_MAX:
            raise InvalidParameter(
                f"the epoch of the next master must be greater than {newest}, not {change.epoch}"
            )

    # --- the master

    async def _step_down(self, change: RoleChange) -> bool:
        """Stop writing, have the slave prepare itself, become its slave."""
        if self._replication.master is None:
            raise Refused("no slave can follow this master: its HA port is off")
        writer = self._store.writer
        before = writer.refusal
        if not isinstance(before, WriteStopped):  # which must still be known when the store closes
            writer.refusal = NotMaster(
                f"this broker is no longer the master; the next one is {change.master_address}"
            )
        self._role.steps_down = True
        try:
            await self._have_prepared(change)
            await self._save(
                AssignedRole(
                    role="slave",
                    broker_id=change.master_id,
                    epoch=change.epoch,
                    master_address=change.master_address,
                )
            )
        except BaseException:
            self._role.steps_down = False
            if isinstance(writer.refusal, NotMaster):
                writer.refusal = before
            raise
        log.warning(
            "this master steps down at log offset %d: the next one is %s (epoch %d)",
            self._store.log.end,
            change.master_address,
            change.epoch,
        )
        return True

    async def _have_prepared(self, change: RoleChange) -> None:
        """Ask the slave to prepare itself."""
        fields = change_fields(change._replace(step=RoleStep.PREPARE, log_end=self._store.log.end))
        why = ""
        try:
            answer = await self._replication.calls.ask(
                change.master_address,
                RequestCode.NOTIFY_BROKER_ROLE_CHANGED,
                fields,
                timeout_ms=STEP_DOWN_MS,
            )
            if answer.code != ResponseCode.SUCCESS:
                why = answer.remark or str(refusal_of(answer.code, answer.remark, "the slave"))
        except PenstockError as error:
            why = str(error)
        if why:
            raise Refused(
                f"slave {change.master_id} could not prepare itself, so this broker is still the "
                f"master: {why}",
                hint="check with `penstock cluster status` that the slave follows, and try again",
            )

    # --- the slave that is promoted

    async def _prepare(self, change: RoleChange) -> bool:
        """Have the log and the tables of the master."""
        self._check_settings(change)
        try:
            await finish_within(self._clock, PREPARE_MS, self._copy_all(change.log_end))
        except TimeoutError:
            behind = change.log_end - self._store.log.end
            raise Refused(
                f"the log of this slave is {behind} bytes behind after {PREPARE_MS // 1000} s"
                if behind > 0
                else f"the log or the tables were not stored within {PREPARE_MS // 1000} s",
                hint="wait until the slave follows closely",
            ) from None
        return False

    async def _copy_all(self, log_end: int) -> None:
        store, metadata = self._store, self._replication.metadata
        assert metadata is not None
        while store.log.end < log_end:
            await pause(self._clock, POLL_MS)
        await in_pool(store.disk, lambda: store.sync_log(log_end))
        await metadata.copy_now()

    def _check_settings(self, change: RoleChange) -> None:
        """Refuse a role with which this broker would not start."""
        config = _as_master(change).applied_to(self._settings.current)
        wrong = contradiction(config)
        if wrong is not None:
            raise Refused(
                f"the settings of this slave do not allow the role {change.role}: {' '.join(wrong)}"
            )
        if change.role == "sync_master" and ha_port(config) == 0:
            raise Refused("the HA port of this slave is off (replication.port): it can't be master")

    async def _take_over(self, change: RoleChange) -> bool:
        """Become the master."""
        self._check_settings(change)
        slave = self._replication.slave
        assert slave is not None
        waited_ms = 0
        while slave.connection is not None:
            if waited_ms >= DISCONNECT_MS:
                raise Refused(
                    f"the master {slave.master} is running: this slave receives its log",
                    hint="promote without --force, so that the master steps down",
                )
            await pause(self._clock, POLL_MS)
            waited_ms += POLL_MS
        await self._save(_as_master(change))
        log.warning("this slave becomes the master (%s, epoch %d)", change.role, change.epoch)
        return True

    # --- another slave

    async def _follow(self, change: RoleChange) -> bool:
        if self._settings.current.replication.master:
            raise Refused(
                "this slave follows the address in replication.master only",
                hint="set replication.master to the HA address of the new master, or remove it, "
                "and restart the slave",
            )
        self._replication.follow(change.master_address, change.epoch)
        return False

    async def _save(self, assigned: AssignedRole) -> None:
        """Save the new role; it is durable then."""
        disk, root, configured = self._store.disk, self._store.paths.root, self._configured
        await in_pool(disk, lambda: save_assigned_role(disk, root, assigned, configured))


def change_fields(change: RoleChange) -> dict[str, str]:
    """The fields of NOTIFY_BROKER_ROLE_CHANGED."""
    return {
        "masterBrokerId": str(change.master_id),
        "masterAddress": change.master_address,
        "masterEpoch": str(change.epoch),
        "syncStateSetEpoch": "0",
        "penstockStep": change.step,
        "penstockRole": change.role,
        "penstockLogEnd": str(change.log_end),
    }


def _as_master(change: RoleChange) -> AssignedRole:
    return AssignedRole(role=change.role, broker_id=MASTER_ID, epoch=change.epoch)
