"""HA connections and logs on disk, for the simulation of failover.

A connection carries bytes in order. They arrive late and in any pieces, and wait while the network
is blocked. A lost connection loses the bytes on the way from any point on; each end notices that at
its own time, or only by silence.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import LogsDiffer, ReplicationError
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.master_session import MasterSession
from penstock.replication.slave_session import SlaveSession
from penstock.store.put import OFFSET_MAX
from tests.sim.failover_world import Node, World
from tests.sim.replication_nodes import InvariantError, ModelLog

if TYPE_CHECKING:
    from tests.sim.failover_services import MasterService, SlaveService

UNSENT_BYTES_MAX = 600
BLOCKED_MS = 100
"""How long bytes wait before the next attempt while the network is blocked."""


class DiskLog(ModelLog):
    """A log with the file of its epochs, which a thread writes, as with `StoreSlaveLog`."""

    def __init__(self, world: World, node: Node, *, sync_flush: bool) -> None:
        super().__init__(sync_flush=sync_flush)
        self._world, self._node = world, node
        self.saved: tuple[Epoch, ...] = ()
        """The epochs in the file."""
        self._stored: tuple[Epoch, ...] | None = None  # what this process has stored
        self._saving: tuple[Epoch, ...] | None = None
        self._epochs_known_to = OFFSET_MAX
        self.failed = False
        """An fsync has failed, and the store was not opened again since then."""
        self._unsafe_from = OFFSET_MAX  # something behind this offset is not on the disk

    @property
    def acknowledged(self) -> int:
        return min(super().acknowledged, self._epochs_known_to)

    @property
    def may_receive(self) -> bool:
        return self._epochs_known_to == OFFSET_MAX and super().may_receive and not self.failed

    def fail(self) -> None:
        """A flush fails: what it was to write is not on the disk, although it can be read. Later
        flushes do not write it."""
        self.failed = True
        if self.flushed < len(self.data):
            self._unsafe_from = min(self.flushed, self._unsafe_from)

    def flush(self) -> None:
        if not self.failed:
            super().flush()

    def truncate(self, offset: int) -> None:
        super().truncate(offset)
        if offset <= self._unsafe_from:
            self._unsafe_from = OFFSET_MAX

    def power_cut(self, rng: random.Random) -> bool:
        self.flushed = min(self.flushed, self._unsafe_from)
        self._unsafe_from = OFFSET_MAX
        return super().power_cut(rng)

    def follow(self, history: EpochHistory) -> None:
        super().follow(history)
        if self._saving is not None or self.history.epochs != self._stored:
            self._epochs_known_to = min(self._epochs_known_to, self.end)
        if self._saving is None:
            self._save()

    def _save(self) -> None:
        epochs = self.history.epochs
        if epochs == self._stored:
            self._epochs_known_to = OFFSET_MAX
            return
        self._saving = epochs

        def stored() -> None:
            if self._saving is epochs:
                self.saved = self._stored = epochs
                self._saving = None
                self._save()

        self._world.at(self._world.rng.choice((0, 1, 20, 200)), stored, self._node)

    def open(self) -> int:
        """As `Replication.__init__`: load the epochs, drop those beyond the log; returns the number
        of the newest. A save that was under way may have reached the disk."""
        self.reopen()
        self.failed = False
        if self._saving is not None and self._world.rng.random() < 0.5:
            self.saved = self._saving
        self._saving = self._stored = None
        self._epochs_known_to = OFFSET_MAX
        self.confirmed = 0
        self.history = EpochHistory(self.saved)
        newest = self.history.last.number if self.history.last is not None else 0
        self.history.cut_after(len(self.data))
        return newest

    def begin_epoch(self, number: int) -> None:
        self.history.append(number, len(self.data))
        self.saved = self.history.epochs


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, world: World, source: Node, target: Node, deliver: Callable[[bytes], None]
    ) -> None:
        self._world = world
        self._source, self._target = source, target
        self._deliver = deliver
        self._buffer = bytearray()
        self._moving = False
        self.open = True

    def __len__(self) -> int:
        return len(self._buffer)

    def push(self, data: bytes) -> None:
        if self.open and data:
            self._buffer += data
            if not self._moving:
                self._move(self._delay_ms())

    def close(self) -> None:
        """Nothing more is sent; a part of what is on the way is lost."""
        if self.open:
            self.open = False
            del self._buffer[self._world.rng.randint(0, len(self._buffer)) :]

    def drop(self) -> None:
        """The target reads no more."""
        self.open = False
        self._buffer.clear()

    def _delay_ms(self) -> int:
        return self._world.delay_ms(self._source, self._target, slow=self._world.slow / 20)

    def _move(self, delay_ms: int) -> None:
        self._moving = True
        self._world.at(delay_ms, self._arrive, self._target)

    def _arrive(self) -> None:
        self._moving = False
        world, buffer = self._world, self._buffer
        if not buffer:
            return
        if world.blocked(self._source, self._target):
            self._move(BLOCKED_MS)
            return
        size = len(buffer)
        if world.rng.random() < 0.1:
            size = world.rng.randint(1, size)
        piece = bytes(buffer[:size])
        del buffer[:size]
        self._deliver(piece)
        if buffer and not self._moving:
            self._move(self._delay_ms())


class HaLink:
    """A connection of a slave to a master."""

    def __init__(
        self,
        world: World,
        slave: SlaveService,
        master: MasterService,
        sessions: tuple[SlaveSession, MasterSession],
    ) -> None:
        self._world = world
        self.slave, self.master = slave, master
        self.slave_session, self.master_session = sessions
        self.slave_open = self.master_open = True
        ends = slave.broker, master.broker
        self.to_master = Pipe(world, *ends, self._master_receives)
        self.to_slave = Pipe(world, *ends[::-1], self._slave_receives)

    def cut(self) -> None:
        """The connection is lost."""
        self.to_master.close()
        self.to_slave.close()
        for node, close in (
            (self.slave.broker, self.close_slave),
            (self.master.broker, self.close_master),
        ):
            if self._world.rng.random() < 0.5:
                self._world.at(self._world.rng.choice((1, 50, 700)), close, node)

    def close_slave(self, *, silent: bool = False) -> None:
        """`silent`: the machine has no power, and the other end does not notice."""
        if self.slave_open:
            self.slave_open = False
            self.slave.link_lost(self)
            self.to_slave.drop()
            self.to_master.close()
            if not silent and self.master_open:
                self._world.send(self.slave.broker, self.master.broker, self.close_master)

    def close_master(self, *, silent: bool = False) -> None:
        if self.master_open:
            self.master_open = False
            self.master.links.pop(self, None)
            self.master_session.closed()
            self.to_master.drop()
            self.to_slave.close()
            if not silent and self.slave_open:
                self._world.send(self.master.broker, self.slave.broker, self.close_slave)

    # --- bytes arrive

    def _master_receives(self, piece: bytes) -> None:
        """As `SlaveConnection.data_received`."""
        if not self.master_open:
            return
        try:
            answer = self.master_session.receive(piece, self._world.now_ms)
        except ReplicationError as error:
            if "connected again" not in error.message:
                raise InvariantError(f"{self.master.broker.name}: {error}") from error
            self.close_master()
            return
        self._compare()
        self.to_slave.push(answer)
        self.master.acknowledged(self)
        self.master_sends()

    def _compare(self) -> None:
        """What a slave has acknowledged is equal to the master's log."""
        replica = self.master_session.replica
        if self.slave_open and replica is not None:
            end = replica.acknowledged
            if self.slave.broker.log.data[:end] != self.master.broker.log.data[:end]:
                raise InvariantError(
                    f"{self.slave.broker.name} differs from its master {self.master.broker.name}"
                )

    def _slave_receives(self, piece: bytes) -> None:
        """As `MasterConnection.buffer_updated`."""
        if not self.slave_open:
            return
        try:
            self.slave_session.receive(memoryview(piece), self._world.now_ms)
        except LogsDiffer as error:
            equal = self.slave.broker.log.data[: error.offset]
            if self.master_open and not self.master.broker.log.data.startswith(equal):
                raise InvariantError(f"the logs differ before {error.offset}") from error
            self.close_slave()
            self.slave.truncate(error.offset)
        except ReplicationError as error:
            self._slave_refuses(error)
        else:
            self.slave_sends()

    def _slave_refuses(self, error: ReplicationError) -> None:
        broker = self.slave.broker
        if "not the master any more" in error.message:
            self._world.events["replaced master refused"] += 1
            self.close_slave()
        elif "no epoch in common" in error.message and not broker.ledger.clean:
            # After an unclean election an operator deletes the store, as the error says.
            broker.stop(disk=True)
            broker.start()
        else:
            raise InvariantError(f"{broker.name}: {error}") from error

    # --- bytes are sent

    def slave_sends(self) -> None:
        if self.slave_open:
            self.to_master.push(self.slave_session.report(self._world.now_ms))

    def slave_ticks(self) -> None:
        """As `MasterConnection.tick`."""
        try:
            self.slave_session.check_idle(self._world.now_ms)
        except ReplicationError:
            self.close_slave()
        self.slave_sends()

    def master_sends(self) -> None:
        data = self.master.broker.log.data
        while self.master_open and len(self.to_slave) < UNSENT_BYTES_MAX:
            frame = self.master_session.next_frame(self._world.now_ms)
            if frame is None:
                break
            self.to_slave.push(frame.header + data[frame.offset : frame.offset + frame.length])

    def master_ticks(self) -> None:
        """As `SlaveConnection.tick`."""
        try:
            self.master_session.check_idle(self._world.now_ms)
        except ReplicationError:
            self.close_master()
        self.master_sends()
