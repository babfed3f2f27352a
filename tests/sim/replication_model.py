"""Replicas of one broker, their connections and an operator, in virtual time and without I/O.

* A **link** carries bytes both ways. They arrive late and in any pieces; a cut loses the bytes that
  are on the way from any point on. Each end notices the cut at its own time, or only by silence.
* An **isolated** replica reaches no other one; its clients still reach it.
* A **crash** keeps what was written, a power cut what was flushed and some whole records more, and
  a lost disk nothing. The epochs are durable when they are stored.
* Numbers of epochs: a promotion takes the next multiple of PROMOTION; a master that has lost the
  end of its log takes the next number.

After each step `check` compares all logs with what was acknowledged and what was read.
"""

import random
from collections import Counter

from penstock.errors import LogsDiffer, ReplicationError
from penstock.replication.master_session import MasterSession, SessionOptions, StaticMasterSession
from penstock.replication.replicas import Replicas
from penstock.replication.slave_session import SlaveOptions, SlaveSession, StaticSlaveSession
from tests.sim.replication_nodes import (
    RECORD_BYTES_MAX,
    InvariantError,
    Link,
    Mode,
    ModelMasterLog,
    Node,
    Parts,
)

PROMOTION = 100
REPORT_MS, IDLE_MS, LAG_MS = 50, 200, 300
UNSENT_BYTES_MAX = 600


class Cluster:
    """A master and its slaves."""

    def __init__(self, mode: Mode, rng: random.Random, slaves: int, parts: Parts) -> None:
        self.mode, self.rng, self.parts = mode, rng, parts
        self.now_ms = 0
        self.serial = 0
        self._number = 0
        self.events: Counter[str] = Counter()
        self.acknowledged = b""
        """The log up to the last acknowledged record."""
        self.seen = b""
        """The log up to the last byte that a reader saw."""
        self.flush_probability = rng.choice((0.02, 0.1, 0.4))
        """Of each replica, at each step."""
        self.flushed_only = mode.static or (mode.sync_flush and rng.random() < 0.5)
        self.frame_bytes_max = rng.choice((50, 150, 1000))
        self.learner = slaves if slaves > 1 and not mode.static and rng.random() < 0.2 else 0
        self.links: list[Link] = []
        self.connections = 0
        self.nodes = [
            Node(i, parts.log(sync_flush=mode.sync_flush), learner=0 < i == self.learner)
            for i in range(slaves + 1)
        ]
        self.master = self.nodes[0]
        """The master that the operator chose."""
        self.candidates: list[Node] = []
        """Slaves that may have what it acknowledged last, as far as the operator knows."""
        self.redundant = False
        """Whether the acknowledged messages survive the loss of the master, as he knows."""
        if not mode.static:
            self.master.log.history.append(self._next_number(), 0)
        self._serve(self.master)

    # --- roles

    def _serve(self, node: Node) -> None:
        """Be the master from now on."""
        log = node.log
        replicas = self.parts.replicas(
            self.mode.rules, log_end=len(log.data), confirmed=min(log.confirmed, len(log.data))
        )
        node.served = ModelMasterLog(log, replicas, flushed_only=self.flushed_only)
        node.shown = 0

    def step_down(self, node: Node) -> None:
        """A master becomes a slave."""
        self._end_links(node)
        node.served = None
        node.waiting = []
        node.log.restart(len(node.log.data))

    def promote(self, node: Node) -> None:
        """Make a slave the master; whoever is reachable hears of it."""
        self._end_links(node)
        node.log.reopen()
        number = self._next_number()
        self._begin_epoch(node, number)
        self.events["promotion"] += 1
        self.master = node
        node.lost_disk = False
        self.candidates = []
        self.redundant = False
        self._serve(node)
        for other in self.nodes:
            if other is not node and other.up and not other.isolated and other.served is None:
                other.told_epoch = number
                if other.link is not None:
                    self._close_slave(other.link)

    def renew(self) -> None:
        """The master begins another epoch while slaves are connected."""
        self._begin_epoch(self.master, self._next_number())

    def _next_number(self) -> int:
        """Of a promotion; never used before, even if nobody knows that any more."""
        self._number += PROMOTION
        return self._number

    def _begin_epoch(self, node: Node, number: int) -> None:
        end = len(node.log.data)
        node.log.history.cut_after(end)
        node.log.history.append(number, end)

    # --- failures

    def stop(self, node: Node, *, power: bool = False, disk: bool = False) -> None:
        """A replica fails."""
        self._end_links(node)
        node.up = False
        node.waiting = []
        node.told_epoch = -1
        node.sent_to = None
        master = node.served is not None
        lost = power and node.log.power_cut(self.rng)
        if disk:
            node.log.delete()
            self.events["lost disk"] += 1
            self.events["lost disk of the master"] += master
            node.served = None
            node.lost_disk = True
            self.redundant &= node is self.master
        elif not self.mode.sync_flush and lost:
            node.lost_disk = True
        if master and lost and self.parts.new_epoch and not self.mode.static:
            self._begin_epoch(node, node.epoch + 1)

    def start(self, node: Node) -> None:
        """A failed replica starts again in its last role."""
        node.up = True
        node.log.reopen()
        node.log.confirmed = 0
        if node.served is not None:
            self._serve(node)

    def isolate(self, node: Node) -> None:
        node.isolated = True
        for link in self._links_of(node):
            link.cut(self.rng)

    # --- links

    def connect(self, slave: Node, master: Node) -> None:
        """A slave connects to a replica that serves slaves."""
        assert master.served is not None
        self.connections += 1
        options = SessionOptions(self.frame_bytes_max, REPORT_MS, IDLE_MS, True)
        slave_options = SlaveOptions(
            REPORT_MS,
            IDLE_MS,
            from_first_segment=True,
            broker_id=slave.index,
            learner=slave.learner,
            acknowledges_flushed=self.mode.sync_flush,
            epoch_least=slave.told_epoch,
        )
        peer = f"{slave.index}:{self.connections}"
        served, now_ms = master.served, self.now_ms
        ends: tuple[SlaveSession, MasterSession]
        if self.mode.static:
            ends = (
                StaticSlaveSession(slave.log, slave_options, now_ms),
                StaticMasterSession(served, served.replicas, options, peer, now_ms),
            )
        else:
            ends = (
                self.parts.slave(slave.log, slave_options, now_ms),
                self.parts.master(served, served.replicas, options, peer, now_ms),
            )
        slave.link = Link(slave, master, ends)
        slave.link.to_master += ends[0].start(now_ms)
        self.links.append(slave.link)

    def misdirect(self, slave: Node, master: Node) -> None:
        """Send a slave that knows the new epoch to a master that was replaced."""
        slave.told_epoch = max(slave.told_epoch, slave.epoch)
        slave.sent_to = master
        if slave.link is not None:
            self._close_slave(slave.link)

    def _links_of(self, node: Node) -> list[Link]:
        return [link for link in self.links if node in (link.slave, link.master)]

    def _end_links(self, node: Node) -> None:
        for link in self._links_of(node):
            close = self._close_slave if link.slave is node else self._close_master
            close(link)

    def _close_slave(self, link: Link) -> None:
        link.cut(self.rng)
        if link.slave_open:
            link.slave_open = False
            link.slave.link = None
            self._forget(link)

    def _close_master(self, link: Link) -> None:
        link.cut(self.rng)
        if link.master_open:
            link.master_open = False
            link.master_session.closed()
            self._forget(link)

    def _forget(self, link: Link) -> None:
        if not link.slave_open and not link.master_open:
            self.links.remove(link)

    # --- one moment

    def pump(self, *, everything: bool = False) -> None:
        """Let bytes arrive, and have each end send what it can."""
        rng = self.rng
        for link in list(self.links):
            if link.master_open and link.to_master and (everything or rng.random() < 0.5):
                self._master_receives(link, everything)
            if link.slave_open and link.to_slave and (everything or rng.random() < 0.5):
                self._slave_receives(link, everything)
            if link.slave_open:
                self._slave_sends(link)
            if link.master_open:
                self._master_sends(link)
            if not link.alive:
                if link.slave_open and rng.random() < link.notice:
                    self._close_slave(link)
                if link.master_open and rng.random() < link.notice:
                    self._close_master(link)
        for node in self.nodes:
            if node.up and node.served is not None:
                self._tick(node, node.served)

    def _piece(self, buffer: bytearray, everything: bool) -> bytes:
        size = len(buffer)
        if not everything and self.rng.random() < 0.5:
            size = self.rng.randint(1, size)
        piece = bytes(buffer[:size])
        del buffer[:size]
        return piece

    def _master_receives(self, link: Link, everything: bool) -> None:
        session = link.master_session
        before = session.position
        try:
            answer = session.receive(self._piece(link.to_master, everything), self.now_ms)
        except ReplicationError as error:
            if link.slave_open or "connected again" not in error.message:
                raise
            self._close_master(link)
            return
        if before < 0 <= session.position and link.slave_open and link.master is self.master:
            link.slave.lost_disk = False  # the master knows now what the slave has
        if link.alive:
            link.to_slave += answer

    def _slave_receives(self, link: Link, everything: bool) -> None:
        slave = link.slave
        try:
            piece = self._piece(link.to_slave, everything)
            link.slave_session.receive(memoryview(piece), self.now_ms)
        except LogsDiffer as error:
            equal = bytes(slave.log.data[: error.offset])
            if link.master_open and not link.master.log.data.startswith(equal):
                raise InvariantError(f"the logs differ before {error.offset}") from error
            self._close_slave(link)
            slave.log.truncate(error.offset)
            self.events["truncation"] += 1
        except ReplicationError as error:
            stale = link.master.epoch < max(slave.epoch, slave.told_epoch)
            if not stale or "not the master" not in error.message:
                raise
            self._close_slave(link)
            self.events["replaced master refused"] += 1

    def _slave_sends(self, link: Link) -> None:
        session = link.slave_session
        report = session.report(self.now_ms)
        if link.alive:
            link.to_master += report
        if self.now_ms > session.due():
            try:
                session.check_idle(self.now_ms)
            except ReplicationError:
                self._close_slave(link)

    def _master_sends(self, link: Link) -> None:
        session, data = link.master_session, link.master.log.data
        while len(link.to_slave) < UNSENT_BYTES_MAX:
            frame = session.next_frame(self.now_ms)
            if frame is None:
                break
            if link.alive:
                link.to_slave += frame.header
                link.to_slave += data[frame.offset : frame.offset + frame.length]
        if self.now_ms > session.due():
            try:
                session.check_idle(self.now_ms)
            except ReplicationError:
                self._close_master(link)

    def _tick(self, node: Node, served: ModelMasterLog) -> None:
        """Remove members that are too late, and acknowledge sends."""
        replicas = served.replicas
        self.events["member left"] += len(replicas.tick(served.end, self.now_ms))
        limit = min(replicas.acknowledged(served.end), node.log.acknowledged)
        done = [end for end in node.waiting if end <= limit]
        if done:
            node.waiting = node.waiting[len(done) :]
            self.events["acknowledged"] += len(done)
            self.acknowledged = self._kept(node, self.acknowledged, done[-1], "acknowledged")
        if node is self.master and not node.isolated:
            slaves = replicas.slaves.values()
            known = [r for r in slaves if r.in_sync or (r.connected and not r.learner)]
            self.candidates = [self.node_of(replica.name) for replica in known]
            self.redundant = self._is_redundant(replicas)

    def _is_redundant(self, replicas: Replicas) -> bool:
        """Whether there are enough copies without the master's, by what slaves have reported."""
        rules, copies = self.mode.rules, 1
        for replica in replicas.in_sync:
            if self.node_of(replica.name).lost_disk:
                return False
            enough = rules.all_in_sync or replica.acknowledged >= len(self.acknowledged)
            copies += replica.connected and enough
        return copies >= max(rules.copies, rules.in_sync_least, 2)

    def node_of(self, name: str) -> Node:
        return self.nodes[int(name.partition(":")[0])]

    # --- clients

    def send(self, node: Node) -> None:
        """A client sends a message to a replica that takes itself for the master."""
        assert node.served is not None
        if node.served.replicas.enough():
            self.serial += 1
            length = self.rng.randint(12, RECORD_BYTES_MAX)
            node.log.append(max(node.epoch, 0), self.serial, length)
            node.waiting.append(len(node.log.data))

    def read(self, node: Node) -> None:
        """A client reads all that a replica shows."""
        if node.served is not None:
            end = node.served.confirm_offset
        else:
            end = min(node.log.confirmed, len(node.log.data))
        self.seen = self._kept(node, self.seen, end, "read")

    def _kept(self, node: Node, kept: bytes, end: int, what: str) -> bytes:
        """The log up to what a client knows of it."""
        promised = self.mode.keeps_acknowledged if what == "acknowledged" else self.mode.keeps_read
        if not promised:
            return b""
        data = bytes(node.log.data[:end])
        if not (data.startswith(kept) or kept.startswith(data)):
            raise InvariantError(f"replica {node.index}: other messages were {what} before")
        return max(data, kept, key=len)

    # --- promises

    def check(self) -> None:
        """Compare the logs with what is promised."""
        log = self.master.log.data
        if not self.master.lost_disk:
            if not log.startswith(self.acknowledged):
                raise InvariantError("acknowledged messages are lost")
            if not log.startswith(self.seen):
                raise InvariantError("messages that were read are lost")
        for node in self.nodes:
            if node.up and node.served is not None:
                self._check_master(node, node.served)

    def _check_master(self, node: Node, served: ModelMasterLog) -> None:
        confirmed = served.replicas.confirm_offset(served.end)
        if confirmed < node.shown:
            raise InvariantError(f"the confirm offset of replica {node.index} goes back")
        node.shown = confirmed
        if not self.mode.rules.sync or node is not self.master:
            return
        shown = bytes(node.log.data[:confirmed])
        for replica in served.replicas.in_sync:
            member = self.node_of(replica.name)
            if self.mode.static and not member.has_reported(replica):
                continue
            if not member.lost_disk and not member.log.data.startswith(shown):
                raise InvariantError(f"member {member.index} differs from master {node.index}")

    def others(self) -> list[Node]:
        return [node for node in self.nodes if node is not self.master]
