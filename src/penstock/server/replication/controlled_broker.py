"""Keeps a broker in contact with its controllers, which elect the master of its set.

* `join` gets an id for the broker and registers it (`membership`).
* Heartbeats go to all controllers. They say that the replica is alive, and how long its log is. An
  answered heartbeat confirms the master. One that is not confirmed for the length of its lease,
  which is as long as controllers wait for heartbeats, acknowledges no more messages.
* The broker asks for the state of its set every `POLL_MS`, in case a notification was lost.
* A master asks for changes of its in-sync set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.clock import pause
from penstock.errors import PeerError, PenstockError, Refused
from penstock.replication.agreed_replicas import REFUSALS
from penstock.replication.controlled_role import (
    ControlledRole,
    Follow,
    Lead,
    SetState,
    TakeOver,
)
from penstock.server.background import TaskSet, in_pool
from penstock.server.replication.controller_answers import read_in_sync, read_state
from penstock.server.replication.controllers import ControllerInfo, Controllers
from penstock.server.replication.membership import Membership
from penstock.store.directory import StorePaths, may_lack_acknowledged
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import SyncStateSet
from penstock.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.store.disk import Disk

log = logging.getLogger(__name__)

POLL_MS = 1_000
INCOMPLETE = "penstock.incomplete"
"""A file that exists while the end of the log may be missing."""
LEASE_CHECK_MS = DISK_CHECK_MS = 100
TAKE_OVER_RETRY_MS = 500
"""Until the next attempt of a replica that could not take over."""
REOPEN_MS = 5_000
"""How often a slave whose disk fails opens its store again."""
LEADER_MS = 2_000
"""How often each controller is asked who the leader is."""


class LogFigures(NamedTuple):
    """What a heartbeat says of the log."""

    epoch: int
    max_offset: int
    confirm_offset: int
    caught_up: bool
    """A slave has the whole log of its master."""


class ControlledService(Protocol):
    """What the contact with controllers needs of the broker's services."""

    def figures(self) -> LogFigures | None:
        """None while the services are being started."""

    def lead(self, lead: Lead, replica_id: int) -> None:
        """Become the master, or take over a changed in-sync set."""

    def follow(self, follow: Follow, replica_id: int) -> None:
        """Follow a master, with this id."""

    async def prepare(self) -> None:
        """Before this replica takes over: acknowledge nothing more, to clients or to the master
        that is replaced, and have the log on the disk. Raises PenstockError or OSError if it is not
        there."""

    def failed(self) -> bool:
        """Whether the store has stopped writing because the disk has failed."""

    async def drop_unflushed(self) -> None:
        """The disk has failed: after a restart, nothing counts as flushed that may not be on it.
        Raises OSError."""

    def reopen(self) -> None:
        """Open the store of a slave again."""

    def resign(self, replica_id: int) -> None:
        """Do not become the master that this replica was elected as: it is a slave with this id
        until the controllers decide again."""

    def set_answered(self, number: int, *, refused: bool) -> None:
        """The request for another in-sync set than that with this number was answered, or its
        answer is lost."""

    def confirmed(self, reason: str) -> None:
        """The controllers confirm this master, or the reason why it must not acknowledge."""


class ControlledBroker:
    """One replica of a broker set."""

    def __init__(
        self,
        settings: LiveSettings,
        controllers: Controllers,
        service: ControlledService,
        disk: Disk,
        root: Path,
        address: str,
        clock: Clock,
    ) -> None:
        """`address` is announced to controllers and other replicas."""
        self._settings = settings
        self._controllers = controllers
        self._service = service
        self._disk = disk
        self._root = root
        self._address = address
        self._clock = clock
        self._tasks = TaskSet()
        self._membership = Membership(settings, controllers, disk, root, address, clock)
        self._registered: SetState | None = None
        self.role: ControlledRole | None = None
        self.confirmed_ms = clock.monotonic_ms()
        """When the last heartbeat was sent that a controller has answered."""
        self.calls_ok = self.calls_failed = 0
        self.role_changes = 0
        self._figures = LogFigures(0, 0, 0, False)
        self._last_epoch = 0
        self._taking_over: TakeOver | None = None
        self._before: tuple[int, frozenset[int]] = 0, frozenset()
        """Until services run: the epoch in which this replica took over, and the set before."""
        self._incomplete = False  # the file INCOMPLETE exists
        self._expired = False
        self._refused_set = ""  # why the last request for another in-sync set was refused
        self._copy_at = ""  # the address of another broker that has taken the id of this one
        self._poll_now = asyncio.Event()

    async def join(self) -> int:
        """Get an id and register; returns the id. Waits until a controller answers.

        Called before the store is opened: then it still shows how the last run has ended.
        """
        self._incomplete = await in_pool(self._disk, self._note_power_failure)
        self._registered = await self._membership.join()
        return self.replica_id

    @property
    def replica_id(self) -> int:
        return self._membership.replica_id

    # --- running

    async def start(self, *, log_epoch: int) -> None:
        """Send heartbeats and learn of elections; the services run already, as a slave."""
        # In the epoch of the registration the last process may have asked for sets, even without
        # its store. It did not with Apache's controllers, which elect no living master.
        if self._registered is not None and self._controllers.penstock:
            log_epoch = max(log_epoch, self._registered.master_epoch)
        now_ms = self._clock.monotonic_ms()
        self.role = ControlledRole(
            self.replica_id, log_epoch=log_epoch, log_complete=not self._incomplete, now_ms=now_ms
        )
        if self._incomplete:
            log.warning(
                "the machine was restarted and the end of the log may be missing: this replica "
                "can't be elected before it has caught up with a master"
            )
        self._tasks.spawn(self._repeat(self._run))
        self._tasks.spawn(self._repeat(self._watch_lease))
        self._tasks.spawn(self._repeat(self._watch_disk))
        for address in self._controllers.addresses:
            self._tasks.spawn(self._repeat(partial(self._send_heartbeats, address)))

    async def _repeat(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do work that never ends. After a fault in Penstock it begins again: a replica without
        heartbeats would never be elected."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("the communication with the controllers failed and starts again")
            await pause(self._clock, POLL_MS)

    def _note_power_failure(self) -> bool:
        """Whether the end of the log may be missing. Only the first start after a power failure
        notices that, and it may fail too: so it is stored until the log is complete. Waits for the
        disk."""
        if may_lack_acknowledged(self._disk, StorePaths(self._root)):
            self._store_incomplete()
        return (self._root / INCOMPLETE).exists()

    def _store_incomplete(self) -> None:
        """Have the next processes know it, too. Waits for the disk."""
        self._disk.replace(self._root / INCOMPLETE, b"", backup=False)

    async def _note_completed(self) -> None:
        """The log is complete again."""
        self._incomplete = False
        await in_pool(self._disk, lambda: self._disk.forget(self._root / INCOMPLETE))

    async def _doubt_log(self) -> None:
        """The disk has failed. Until a master has given this replica its log, it is not elected,
        even after a restart."""
        assert self.role is not None
        self.role.doubt_log()
        self._incomplete = True
        try:
            await in_pool(self._disk, self._store_incomplete)
            await self._service.drop_unflushed()
        except OSError as error:
            log.warning("can't store that the end of the log may be missing: %s", error)

    async def close(self) -> None:
        await self._tasks.close()
        await self._controllers.close()

    async def _run(self) -> None:
        warned = False
        while True:
            try:
                await self._poll()
                warned = False
            except PenstockError as error:
                if not warned:
                    log.warning("the controllers do not report a master: %s", error)
                warned = True
            self._poll_now.clear()
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_MS / 1000):
                    await self._poll_now.wait()

    async def _poll(self) -> None:
        """Learn the state of the set; have a master elected if there is none."""
        assert self.role is not None
        await self._learn_state()
        electable = self._controllers.penstock or self.role.alive(self._clock.monotonic_ms())
        if self.role.unable:
            await self._have_replaced(self.role)
        elif self.role.needs_election and electable:
            await self._elect(self.replica_id, designate=False)

    async def _learn_state(self) -> None:
        """Ask for the state of the set, or take that which the registration has told."""
        state, self._registered = self._registered, None
        if state is None or state.master_id is None:
            fields = {"brokerName": self._settings.current.broker.name}
            response = await self._controllers.call(RequestCode.CONTROLLER_GET_REPLICA_INFO, fields)
            if response.code == ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST:
                await self._join_again()
                return
            state = read_state(response)
        self.learn(state)

    async def _join_again(self) -> None:
        """The controllers have lost their state, or an operator has deleted this replica."""
        log.warning("the controllers no longer know this replica")
        await self._membership.register()

    async def _elect(self, replica_id: int, *, designate: bool) -> bool:
        fields = {
            **self._membership.names(),
            "brokerId": str(replica_id),
            "designateElect": str(designate).lower(),
            "invokeTime": str(self._clock.now_ms()),
        }
        response = await self._controllers.call(RequestCode.CONTROLLER_ELECT_MASTER, fields)
        if response.code not in (ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST):
            log.info("no master was elected: %s", response.remark)
            return False
        if "masterEpoch" in response.ext:
            self.learn(read_state(response))
        return response.code == ResponseCode.SUCCESS

    def learn(self, state: SetState) -> None:
        """Take what a controller says of the set, also in a notification."""
        if self.role is None:
            return
        if state.master_id == self.replica_id and state.master_address not in ("", self._address):
            self._give_way(state.master_address)
        else:
            self._act(self.role.learn(state, self._clock.monotonic_ms()))

    def _give_way(self, address: str) -> None:
        """Another process is the master under the id of this replica: one of them has a copy of
        the data directory. Two masters with one id and epoch would not notice each other."""
        if self._copy_at:
            return
        self._copy_at = address
        reason = f"the broker at {address} has registered with the id {self.replica_id} of this one"
        log.error(
            "this broker accepts no messages until it is restarted: %s. Stop that broker, or start "
            "this one with an empty data directory",
            reason,
        )
        self._service.confirmed(reason)

    def _act(self, action: Lead | TakeOver | Follow | None) -> None:
        assert self.role is not None
        if action is not None and self.role.epoch != self._last_epoch:
            self._last_epoch = self.role.epoch
            self.role_changes += 1
        if isinstance(action, Lead):
            self._service.lead(action, self.replica_id)
            self._check_lease()  # of a slave, nobody has looked at it
        elif isinstance(action, Follow):
            self._service.follow(action, self.replica_id)
        elif isinstance(action, TakeOver) and action != self._taking_over:
            self._taking_over = action
            self._tasks.spawn(self._take_over(action))

    async def _take_over(self, action: TakeOver) -> None:
        """Ask for an in-sync set of this replica alone; from then on it is the only one that can be
        elected, and it leads."""
        log.info("this replica is elected: it takes over in epoch %d", action.epoch)
        assert self.role is not None
        if self.role.state is not None:
            self._before = action.epoch, self.role.state.before
        try:
            if await self._is_prepared():  # from then on, no other replica need have the log
                response = await self._ask_for_set(
                    {self.replica_id}, action.in_sync_epoch, action.epoch
                )
                self._agreed(response, action.epoch)
                if response.code != ResponseCode.SUCCESS:
                    log.warning("the takeover is refused: %s", response.remark)
                    await pause(self._clock, TAKE_OVER_RETRY_MS)
        except PenstockError as error:
            log.warning("the outcome of a takeover is unknown: %s", error)
        finally:
            self._taking_over = None
            self._poll_now.set()

    async def _is_prepared(self) -> bool:
        """Whether this replica may take over. If its disk has failed, another one must."""
        try:
            await self._service.prepare()
        except (PenstockError, OSError) as error:
            log.error("this replica can't take over: %s", error)
            if self._service.failed():
                await self._doubt_log()
            await pause(self._clock, TAKE_OVER_RETRY_MS)
            return False
        return True

    # --- heartbeats

    async def _send_heartbeats(self, address: str) -> None:
        peer = self._controllers.peer(address)
        info, asked_ms = ControllerInfo("", penstock=False), -LEADER_MS
        while True:
            now_ms = self._clock.monotonic_ms()
            if now_ms - asked_ms >= LEADER_MS:
                asked_ms = now_ms
                info = await self._controllers.describe(address)
            fields = self._heartbeat(now_ms, penstock=info.penstock)
            if fields is not None:
                try:
                    response = await peer.call(
                        RequestCode.BROKER_HEARTBEAT, fields, timeout_ms=self._lease_ms
                    )
                    self._count(response.code == ResponseCode.SUCCESS)
                    # Of Apache's controllers, only the leader knows of every election.
                    decides = info.penstock or info.leader == address
                    if response.code == ResponseCode.SUCCESS and decides:
                        self._confirmed(now_ms)
                except PeerError:
                    self._count(False)
                    asked_ms = -LEADER_MS
            await pause(self._clock, self._settings.current.replication.heartbeat_ms)

    def _heartbeat(self, now_ms: int, *, penstock: bool) -> dict[str, str] | None:
        """The fields of a heartbeat; None if another broker has the id of this one, or if this
        replica must not be elected and the controller is one of Apache's, which can't be told
        that."""
        figures = self._service.figures()
        assert self.role is not None
        if figures is not None and figures.caught_up and not self._service.failed():
            self.role.caught_up()
        silent = bool(self._copy_at) or (not penstock and not self.role.alive(now_ms))
        if self._incomplete and self.role.complete:
            self._tasks.spawn(self._note_completed())
        if silent:
            return None
        self._figures = figures = figures or self._figures  # none while services are restarted
        return {
            **self._membership.names(),
            "brokerAddr": self._address,
            "brokerId": str(self.replica_id),
            "epoch": str(figures.epoch),
            "maxOffset": str(figures.max_offset),
            "confirmOffset": str(figures.confirm_offset),
            "heartbeatTimeoutMills": str(self._lease_ms),
            "electionPriority": str(self._settings.current.replication.election_priority),
            "penstockLogIncomplete": str(not self.role.complete).lower(),
            "penstockTakesOver": "true",
        }

    def _count(self, ok: bool) -> None:
        self.calls_ok += ok
        self.calls_failed += not ok

    def _confirmed(self, sent_ms: int) -> None:
        self.confirmed_ms = max(self.confirmed_ms, sent_ms)
        # After a pause of this process a confirmation may be older than the lease.
        if self._expired and not self._copy_at and self.lease_age_ms <= self._lease_ms:
            self._expired = False
            log.warning("the controllers confirm this master again")
            self._service.confirmed("")

    async def _watch_lease(self) -> None:
        while True:
            self._check_lease()
            await pause(self._clock, LEASE_CHECK_MS)

    def _check_lease(self) -> None:
        """A master that its controllers may have replaced must not acknowledge messages."""
        age_ms = self.lease_age_ms
        if self._expired or age_ms <= self._lease_ms or self.role is None or not self.role.leads:
            return
        if self._copy_at:  # this broker acknowledges nothing anyway
            return
        self._expired = True
        reason = f"no controller has confirmed a heartbeat for {age_ms} ms"
        log.warning("this master acknowledges no messages: %s", reason)
        self._service.confirmed(reason)

    @property
    def _lease_ms(self) -> int:
        return self._settings.current.replication.heartbeat_timeout_ms

    @property
    def lease_age_ms(self) -> int:
        """How long ago the controllers have confirmed this replica."""
        return self._clock.monotonic_ms() - self.confirmed_ms

    @property
    def in_sync(self) -> bool:
        """Whether this replica is a member of the in-sync set, as far as it knows."""
        state = None if self.role is None else self.role.state
        return state is not None and self.replica_id in state.in_sync

    @property
    def in_sync_count(self) -> int:
        """How many members the in-sync set has, as far as this replica knows."""
        state = None if self.role is None else self.role.state
        return 0 if state is None else len(state.in_sync)

    # --- the in-sync set

    def ask_for_set(self, epoch: int, members: Iterable[str], number: int) -> None:
        """The master of an epoch asks the controllers for another in-sync set."""
        self._tasks.spawn(self._alter(epoch, frozenset(int(name) for name in members), number))

    async def _alter(self, epoch: int, members: frozenset[int], number: int) -> None:
        try:
            response = await self._ask_for_set(members, number, epoch)
            if response.code != ResponseCode.SUCCESS and response.code not in REFUSALS:
                raise Refused(f"{response.remark} (code {response.code})")
        except PenstockError as error:
            log.warning("the outcome of a change of the in-sync set is unknown: %s", error)
            self._service.set_answered(number, refused=False)
            self._poll_now.set()
            return
        refused = response.code != ResponseCode.SUCCESS
        if refused:
            if response.remark != self._refused_set:  # asked for again and again
                log.info("the in-sync set is not changed: %s", response.remark)
            self._refused_set = response.remark or ""
            self._poll_now.set()
        else:
            self._refused_set = ""
            self._agreed(response, epoch)
        self._service.set_answered(number, refused=refused)

    async def _ask_for_set(self, members: Iterable[int], number: int, epoch: int) -> Response:
        fields = {
            "brokerName": self._settings.current.broker.name,
            "masterBrokerId": str(self.replica_id),
            "masterEpoch": str(epoch),
            "invokeTime": str(self._clock.now_ms()),
        }
        body = SyncStateSet(sync_state_set=sorted(members), sync_state_set_epoch=number)
        code = RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET
        return await self._controllers.call(code, fields, fastjson.encode(body), attempts=1)

    def _agreed(self, response: Response, epoch: int) -> None:
        """The controllers have agreed to a set that was asked for in an epoch."""
        assert self.role is not None
        if response.code == ResponseCode.SUCCESS:
            agreed, now_ms = read_in_sync(response), self._clock.monotonic_ms()
            self._act(self.role.agreed(epoch, agreed.in_sync, agreed.number, now_ms))

    # --- handing over

    async def _watch_disk(self) -> None:
        """A replica whose disk has failed must not be the master, and opens its store again."""
        reported = False
        while True:
            await pause(self._clock, POLL_MS if reported else DISK_CHECK_MS)
            role = self.role
            if role is None or not self._service.failed():
                reported = False
                continue
            if not reported:
                reported = True
                log.error("this replica can't store messages: it must not be the master")
                await self._doubt_log()
            if role.leads:
                await self.hand_over()
            elif not role.needs_election:  # there is another master
                self._service.reopen()
                await pause(self._clock, REOPEN_MS)

    def stopped(self, figures: LogFigures) -> None:
        """The services have stopped. Until others run, heartbeats say these figures: if no log of
        the set is known to be complete, the longest one counts."""
        self._figures = figures

    def serves(self) -> None:
        """The store is open, and the services of the present role begin to answer."""
        self._before = 0, frozenset()
        if self.role is not None:
            self.role.unable = False

    async def cannot_serve(self) -> None:
        """The services can't be started: another replica has to be the master until they can.

        Services that ran for a moment may have asked for a set that is still agreed to. The next
        ones do not know its members, so they need another epoch.
        """
        role = self.role
        if role is None:
            return
        role.unable = True
        if role.leads:
            role.resign()
            self._service.resign(self.replica_id)
        await self._have_replaced(role)

    async def hand_over(self) -> bool:
        """Before this master ends: have another member of the in-sync set elected."""
        role = self.role
        return role is not None and role.leads and await self._have_replaced(role)

    async def _have_replaced(self, role: ControlledRole) -> bool:
        """If this replica is the master for the controllers: have another one elected that has
        every acknowledged message.

        In the set of a master that has just taken over there is no other one. If it has resigned
        before its services ran, the members of the set before still have each of these messages.
        """
        state = role.state
        if state is None or state.master_id != self.replica_id:
            return False
        others = state.in_sync | state.before | self._given_back(role, state)
        for replica_id in sorted(others - {self.replica_id}):
            try:
                elected = await self._include(role, replica_id)
                elected = elected and await self._elect(replica_id, designate=True)
            except PenstockError as error:
                log.warning("can't hand over to replica %d: %s", replica_id, error)
                elected = False
                with contextlib.suppress(PenstockError):
                    await self._learn_state()  # perhaps only the answer was lost
            if elected or role.state is None or role.state.master_id != self.replica_id:
                log.info("another replica is elected instead of this master")
                return True
        return False

    def _given_back(self, role: ControlledRole, state: SetState) -> frozenset[int]:
        """The members of the set before the present epoch, if nothing was acknowledged in it."""
        epoch, members = self._before
        return members if epoch == state.master_epoch and not role.leads else frozenset()

    async def _include(self, role: ControlledRole, replica_id: int) -> bool:
        """Have a member of the set before in the in-sync set; returns whether it can be elected."""
        state = role.state
        assert state is not None
        if replica_id in state.in_sync | state.before:
            return True
        if replica_id not in self._given_back(role, state):
            return False
        members = {self.replica_id, replica_id}
        response = await self._ask_for_set(members, state.in_sync_epoch, state.master_epoch)
        self._agreed(response, state.master_epoch)
        if response.code != ResponseCode.SUCCESS:
            log.info("replica %d can't be elected: %s", replica_id, response.remark)
        return response.code == ResponseCode.SUCCESS
