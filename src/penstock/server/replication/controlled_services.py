"""Carries out what controllers decide about the role of a running broker.

A master that is replaced accepts and acknowledges nothing from the moment it learns of that. Then
its services are stopped and started again as those of a slave, and the reverse for a slave that is
elected: the store is closed and opened in between, but the process goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import MasterNotConfirmed, NotMaster, SystemBusy, WriteStopped
from penstock.replication.agreed_replicas import AgreedReplicas
from penstock.replication.assigned_role import AssignedRole
from penstock.replication.controlled_role import Follow, Lead
from penstock.server.background import in_pool
from penstock.server.replication.controlled_broker import LogFigures
from penstock.store.recovery.truncation import Truncation, request_truncation
from penstock.wire.codes import MASTER_ID

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.server.replication.replication import Replication
    from penstock.server.server import Server
    from penstock.store.store import MessageStore

log = logging.getLogger(__name__)


class RunningServices(NamedTuple):
    """The services of a broker between a start and the next stop."""

    broker: Broker
    server: Server
    replication: Replication


def log_figures(store: MessageStore, replication: Replication) -> LogFigures:
    """What a heartbeat says of a log."""
    slave = replication.slave
    last = (replication.history if slave is None else slave.log.history).last
    return LogFigures(
        0 if last is None else last.number,
        store.log.end,
        store.confirm_offset,
        slave is not None and slave.connection is not None and slave.caught_up,
    )


class ControlledServices:
    """The services of a broker whose role controllers give."""

    def __init__(
        self, running: Callable[[], RunningServices | None], restart: Callable[[], None]
    ) -> None:
        """`running` are the services that run now. `restart` starts them again with the role that
        `assigned` says."""
        self._running = running
        self._restart = restart
        self.assigned = AssignedRole(role="slave")
        self.lead_state = Lead(0, frozenset(), 0)
        """Master: the last news of its in-sync set."""
        self._unconfirmed = ""
        self.confirm_offset = 0
        """The log up to here is confirmed, as far as this process knows. That stays true in all
        later roles, because every later master has it."""

    def joined(self, replica_id: int) -> None:
        """The broker is a slave with this id until the controllers say otherwise."""
        self.assigned = AssignedRole(role="slave", broker_id=replica_id)

    # --- what the contact with the controllers calls

    def figures(self) -> LogFigures | None:
        running = self._running()
        if running is None:
            return None
        store = running.broker.context.store
        self.confirm_offset = max(self.confirm_offset, store.confirm_offset)
        return log_figures(store, running.replication)

    def lead(self, lead: Lead, replica_id: int) -> None:
        """Become the master of an epoch; at the master, take over its in-sync set."""
        leads = self.assigned.role != "slave" and self.assigned.epoch == lead.epoch
        if leads and lead.in_sync_epoch < self.lead_state.in_sync_epoch:
            return
        self.lead_state = lead
        running = self._running()
        if not leads:
            log.warning("this replica is elected: it is the master of epoch %d", lead.epoch)
            if running is not None:
                self._stop_acknowledging(running, f"this broker begins epoch {lead.epoch}")
                running.server.hang_up()
            self._assign(AssignedRole(role="sync_master", broker_id=MASTER_ID, epoch=lead.epoch))
            return
        # The services of the last epoch may run still: its set is another one.
        if running is not None and running.replication.epoch == lead.epoch:
            master = running.replication.master
            if master is not None:
                master.agree(map(str, lead.in_sync), lead.in_sync_epoch)

    def follow(self, follow: Follow, replica_id: int) -> None:
        """Follow the master of an epoch."""
        was_slave = self.assigned.role == "slave"
        assigned = AssignedRole(
            role="slave",
            broker_id=replica_id,
            epoch=follow.epoch,
            master_address=follow.address,
        )
        running = self._running()
        if was_slave:
            self.assigned = assigned
            if self.failed():
                self._restart()
            elif running is not None and running.broker.role.slave:
                running.replication.follow(follow.address, follow.epoch)
            return
        log.warning("%s is the master of epoch %d: this one steps down", *follow)
        if running is not None:
            self._stop_acknowledging(
                running, f"{follow.address} is the master since epoch {follow.epoch}"
            )
            running.server.hang_up()
        self._assign(assigned)

    def _assign(self, assigned: AssignedRole) -> None:
        self.figures()  # notes what is confirmed
        self.assigned = assigned
        self._restart()

    def _stop_acknowledging(self, running: RunningServices, why: str) -> None:
        """Accept and acknowledge no messages until the services have been restarted."""
        writer, replication = running.broker.context.store.writer, running.replication
        if replication.master is None:
            replication.leave_master()
            return
        running.broker.role.steps_down = True
        replication.master.acknowledging = False
        if not isinstance(writer.refusal, WriteStopped):
            writer.refusal = NotMaster(why)

    async def prepare(self) -> None:
        """Before this replica takes over: what it acknowledged to the master that is replaced is on
        the disk, and nothing is acknowledged after that."""
        running = self._running()
        if running is None:
            raise SystemBusy("the services of this broker are being restarted")
        self._stop_acknowledging(running, "this broker takes over")
        store = running.broker.context.store
        end = store.log.end
        await in_pool(store.disk, lambda: store.sync_log(end))
        store.publish()  # notes what the flusher reports
        # After an fsync that has failed, the next one may succeed although the bytes are lost.
        if isinstance(store.writer.refusal, WriteStopped):
            raise store.writer.refusal

    def failed(self) -> bool:
        """Whether the store has stopped writing because the disk has failed."""
        running = self._running()
        if running is None:
            return False
        store = running.broker.context.store
        return bool(store.flusher.failed()) or isinstance(store.writer.refusal, WriteStopped)

    async def drop_unflushed(self) -> None:
        """The disk has failed: the next start of the store truncates what was not flushed.

        After an fsync that has failed, these bytes can still be read, and the next fsync succeeds,
        but they may not be on the disk. Under sync flush this replica has not acknowledged them,
        and a master gives them again. Under async flush it may have; but then no log counts as
        complete after a power failure.
        """
        running = self._running()
        if running is None or not self.failed():  # the store has been opened again
            return
        store = running.broker.context.store
        flushed = store.flusher.flushed()
        if store.flusher.group_commit and flushed < store.log.end:
            cut = Truncation(flushed, "the disk has failed, and the rest was not flushed")
            await in_pool(store.disk, lambda: request_truncation(store.disk, store.paths, cut))

    def reopen(self) -> None:
        """Open the store of a slave again."""
        if self.assigned.role == "slave":
            self._restart()

    def resign(self, replica_id: int) -> None:
        """Do not become the master; the services do not run."""
        self.joined(replica_id)

    def set_answered(self, number: int, *, refused: bool) -> None:
        running = self._running()
        master = None if running is None else running.replication.master
        if master is not None and isinstance(master.replicas, AgreedReplicas):
            master.replicas.answered(number, refused=refused)

    def confirmed(self, reason: str) -> None:
        """The controllers confirm this master; or the reason why it must not acknowledge."""
        self._unconfirmed = reason
        self.apply_confirmation()

    def apply_confirmation(self) -> None:
        """Also after a start: the new services know nothing of it."""
        running = self._running()
        master = None if running is None else running.replication.master
        if running is None or master is None or running.broker.role.steps_down:
            return
        writer = running.broker.context.store.writer
        if self._unconfirmed and writer.refusal is None:
            writer.refusal = MasterNotConfirmed(self._unconfirmed)
        elif not self._unconfirmed and isinstance(writer.refusal, MasterNotConfirmed):
            writer.refusal = None
        master.acknowledging = not self._unconfirmed
        master.progress()
        running.server.after_work()
