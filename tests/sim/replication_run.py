"""One simulated life of a broker's replicas, from a seed.

    python -m tests.sim.replication_run SEED

repeats a seed and prints what happened.

Crashes, cut links and isolated replicas come at any time, under sync flush power cuts too. Disks
are lost one at a time, as the promise in `penstock.replication.replicas` says.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable

from penstock.replication.replicas import ReplicaRules
from tests.sim.replication_model import LAG_MS, Cluster
from tests.sim.replication_nodes import InvariantError, Mode, Node, Parts

STEPS = 250
ROUNDS_TO_CONVERGE = 150


def _rules(*, sync: bool, copies: int, least: int, all_in_sync: bool = False) -> ReplicaRules:
    return ReplicaRules(sync, copies, least, all_in_sync, lag_bytes_max=2000, lag_ms_max=LAG_MS)


STRICT = _rules(sync=True, copies=2, least=2)
MODES = [
    Mode("two copies", STRICT),
    Mode("two copies, one in sync is enough", STRICT._replace(in_sync_least=1), keeps_read=False),
    Mode("all members", _rules(sync=True, copies=1, least=2, all_in_sync=True)),
    Mode("two copies in memory", STRICT, sync_flush=False, loses_power=False),
    Mode(
        "async", _rules(sync=False, copies=1, least=1), sync_flush=False,
        keeps_acknowledged=False, keeps_read=False,
    ),
    Mode("static", STRICT._replace(in_sync_least=1), static=True),
]  # fmt: skip


class Life:
    """The steps of one seed."""

    def __init__(self, seed: int, parts: Parts, trace: Callable[[str], None] | None) -> None:
        self.rng = random.Random(seed)
        self.mode = MODES[seed % len(MODES)]
        self.trace = trace
        self.cluster = Cluster(self.mode, self.rng, self.rng.randint(1, 3), parts)
        actions: list[tuple[Callable[[], None], float]] = [
            (self._send, 20),
            (self._read, 6),
            (self._cut, 2),
            (self._crash, 0.7),
            (self._isolate, 1.5),
            (self._lose_disk, 0.6),
        ]
        if self.mode.loses_power:
            actions.append((self._cut_power, 1))
        if not self.mode.static:
            actions += [(self._switch, 0.7), (self._renew, 0.3), (self._misdirect, 4)]
        self.actions = [action for action, _ in actions]
        self.weights = [weight * self.rng.choice((0.3, 1, 3)) for _, weight in actions]

    def run(self) -> None:
        for _ in range(STEPS):
            self._step()
        self._converge()

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.cluster.now_ms:5} {text}")

    def _step(self) -> None:
        cluster, rng = self.cluster, self.rng
        cluster.now_ms += rng.choice((0, 1, 2, 5, 20))
        rng.choices(self.actions, self.weights)[0]()
        self._recover()
        for node in cluster.nodes:
            if node.up and rng.random() < cluster.flush_probability:
                node.log.flush()
        cluster.pump()
        cluster.check()

    # --- clients

    def _send(self) -> None:
        masters = [node for node in self.cluster.nodes if node.up and node.served is not None]
        for _ in range(self.rng.randint(1, 3)):
            if masters:
                self.cluster.send(self.rng.choice(masters))

    def _read(self) -> None:
        node = self.rng.choice(self.cluster.nodes)
        if node.up:
            self.cluster.read(node)

    # --- failures

    def _cut(self) -> None:
        if self.cluster.links:
            self.rng.choice(self.cluster.links).cut(self.rng)

    def _crash(self) -> None:
        node = self.rng.choice(self.cluster.nodes)
        if node.up:
            self._note(f"crash of {node.index}")
            self.cluster.stop(node)

    def _cut_power(self) -> None:
        nodes = self.cluster.nodes
        for node in nodes if self.rng.random() < 0.3 else [self.rng.choice(nodes)]:
            if node.up:
                self._note(f"power cut of {node.index}, flushed to {node.log.flushed}")
                self.cluster.stop(node, power=True)

    def _isolate(self) -> None:
        cluster, rng = self.cluster, self.rng
        node = cluster.master if rng.random() < 0.5 else rng.choice(cluster.nodes)
        if not node.isolated:
            self._note(f"isolation of {node.index}")
            self.cluster.isolate(node)

    def _lose_disk(self) -> None:
        cluster = self.cluster
        node = self.rng.choice(cluster.nodes)
        others = [other for other in cluster.nodes if other is not node]
        if not self.mode.static and not any(n.epoch >= 0 and not n.learner for n in others):
            return
        if self.mode.keeps_acknowledged and not self._may_lose_disk(node):
            return
        self._note(f"{node.index} loses its disk with {len(node.log.data)} bytes")
        if not node.up:
            cluster.start(node)
        cluster.stop(node, disk=True)

    def _may_lose_disk(self, node: Node) -> bool:
        cluster = self.cluster
        if not _serves(cluster.master):
            return False
        return node is not cluster.master or (cluster.redundant and not self.mode.static)

    # --- recovery, and what the operator does

    def _recover(self) -> None:
        cluster, rng = self.cluster, self.rng
        for node in cluster.nodes:
            if not node.up and rng.random() < 0.1:
                cluster.start(node)
                self._note(f"start of {node.index}")
            elif node.isolated and rng.random() < 0.04:
                node.isolated = False
                self._note(f"{node.index} is not isolated any more")
            elif node.up and not node.isolated and rng.random() < 0.3:
                self._find_role(node)
        if not _serves(cluster.master) and not self.mode.static and rng.random() < 0.15:
            self._promote()

    def _find_role(self, node: Node) -> None:
        """A master that was replaced steps down; a slave connects."""
        cluster, rng = self.cluster, self.rng
        if node.served is not None:
            if node is not cluster.master and rng.random() < 0.1:
                self._note(f"{node.index} steps down")
                cluster.step_down(node)
        elif node.link is None and node is not cluster.master:
            if rng.random() < 0.1:
                node.sent_to = None
            master = node.sent_to or cluster.master
            if _serves(master):
                cluster.connect(node, master)

    def _misdirect(self) -> None:
        """A slave that knows of the new master is sent to a replaced one."""
        cluster = self.cluster
        replaced = [node for node in cluster.others() if _serves(node)]
        slaves = [
            node for node in cluster.others()
            if _reachable(node) and node.served is None
            and max(node.epoch, node.told_epoch) >= cluster.master.epoch
        ]  # fmt: skip
        if replaced and slaves:
            cluster.misdirect(self.rng.choice(slaves), self.rng.choice(replaced))

    def _switch(self) -> None:
        """A planned change of the master."""
        if _serves(self.cluster.master):
            self._promote()

    def _renew(self) -> None:
        if self.cluster.master.up and self.cluster.master.served is not None:
            self._note("the master begins another epoch")
            self.cluster.renew()

    def _promote(self) -> None:
        cluster = self.cluster
        chosen = self._successor()
        if chosen is None:
            return
        old = cluster.master
        if _serves(old):
            cluster.step_down(old)
        cluster.promote(chosen)
        self._note(f"{chosen.index} replaces {old.index} at {len(chosen.log.data)}: {chosen.epoch}")

    def _successor(self) -> Node | None:
        """The slave that a careful operator promotes."""
        cluster = self.cluster
        if not self.mode.keeps_acknowledged:
            known = max(node.epoch for node in cluster.nodes) >= 0
            able = [n for n in cluster.others() if not n.learner and _reachable(n)]
            able = [n for n in able if n.epoch >= 0 or not known]
            return self.rng.choice(able) if able else None
        candidates = cluster.candidates
        if not cluster.redundant or not all(map(_reachable, candidates)):
            return None  # another one may have more
        candidates = [node for node in candidates if node.epoch >= 0]
        return max(candidates, key=lambda node: node.rank, default=None)

    # --- the end

    def _converge(self) -> None:
        """Without failures all logs become equal, and sends are acknowledged again."""
        cluster = self.cluster
        for node in cluster.nodes:
            node.isolated = False
            if not node.up:
                cluster.start(node)
        if cluster.master.served is None:
            self._promote()
        for node in cluster.others():
            if node.served is not None:
                cluster.step_down(node)
        self._note(f"quiet, master {cluster.master.index}")
        self._until(self._equal, "the logs do not become equal")
        cluster.send(cluster.master)
        end = len(cluster.master.log.data)
        self._until(lambda: not cluster.master.waiting, "no acknowledgement")
        self._until(lambda: self._shown() == end, "readers do not see the last message")
        self._until(self._equal, "the logs do not become equal again")

    def _shown(self) -> int:
        cluster = self.cluster
        assert cluster.master.served is not None
        for node in cluster.nodes:
            cluster.read(node)
        return cluster.master.served.confirm_offset

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        cluster = self.cluster
        for _ in range(ROUNDS_TO_CONVERGE):
            cluster.now_ms += 5
            for node in cluster.others():
                if node.link is None:
                    cluster.connect(node, cluster.master)
            cluster.pump(everything=True)
            for node in cluster.nodes:
                node.log.flush()
            cluster.check()
            if done():
                return
        raise InvariantError(otherwise)

    def _equal(self) -> bool:
        master = self.cluster.master
        assert master.served is not None
        end = len(master.log.data)
        epochs = [epoch for epoch in master.log.history.epochs if epoch.begin < end]
        for node in self.cluster.others():
            if node.log.data != master.log.data:
                return False
            mine = [epoch for epoch in node.log.history.epochs if epoch.begin < end]
            if not self.mode.static and mine != epochs:
                return False
        members = {self.cluster.node_of(r.name).index for r in master.served.replicas.in_sync}
        return members == {n.index for n in self.cluster.others() if not n.learner}


def _reachable(node: Node) -> bool:
    return node.up and not node.isolated


def _serves(node: Node) -> bool:
    return _reachable(node) and node.served is not None


def run_seed(
    seed: int, parts: Parts | None = None, trace: Callable[[str], None] | None = None
) -> Counter[str]:
    """Run a seed and count what happened; raises what is wrong."""
    life = Life(seed, parts or Parts(), trace)
    life.run()
    return life.cluster.events


if __name__ == "__main__":
    run_seed(int(sys.argv[1]), trace=print)
