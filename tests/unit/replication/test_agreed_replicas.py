"""The slaves of a master whose in-sync set is kept by controllers."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.replication.agreed_replicas import ABSENT_MS, UNKNOWN_MS, AgreedReplicas
from penstock.replication.replicas import NO_LIMIT, Replica, ReplicaRules
from tests.depth import rounds

START_MS = 10_000
LAG_MS = 2_000
RULES = ReplicaRules(True, 2, 2, True, lag_bytes_max=500, lag_ms_max=LAG_MS)


class Master:
    """A master "1" with slaves, a log and a clock."""

    def __init__(self, *members: str, least: int = 2, log_end: int = 0, confirmed: int = 0) -> None:
        rules = RULES._replace(in_sync_least=least)
        self.replicas = AgreedReplicas(
            rules, "1", ["1", *members], 1, START_MS, log_end=log_end, confirmed=confirmed
        )
        self.now_ms = START_MS
        self.end = log_end
        self.slaves: dict[str, Replica] = {}

    def connect(self, name: str, **options: Any) -> None:
        self.slaves[name] = self.replicas.connect(name, self.now_ms, **options)

    def acknowledge(self, name: str, offset: int | None = None) -> None:
        has = self.end if offset is None else offset
        assert not self.replicas.acknowledge(self.slaves[name], has, self.end, self.now_ms)

    def join(self, *names: str) -> None:
        """Slaves connect, have all, and the controllers agree."""
        for name in names:
            self.connect(name)
            self.acknowledge(name)
        wanted = self.ask()
        assert wanted is not None
        self.agree(*wanted)

    def disconnect(self, name: str) -> None:
        self.replicas.disconnect(self.slaves[name])

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        assert self.replicas.tick(self.end, self.now_ms) == []

    def ask(self) -> frozenset[str] | None:
        return self.replicas.ask(self.end, self.now_ms)

    def agree(self, *members: str) -> None:
        number = self.replicas.number
        assert self.replicas.agree(members, number + 1, self.now_ms)
        self.replicas.answered(number, refused=False)

    @property
    def acknowledged(self) -> int:
        return self.replicas.acknowledged(self.end)

    @property
    def confirmed(self) -> int:
        return self.replicas.confirm_offset(self.end)


def test_a_master_alone_acknowledges_only_if_one_member_is_enough() -> None:
    for least, acknowledged in ((1, 100), (2, 0)):
        master = Master(least=least)
        master.end = 100
        assert (master.acknowledged, master.confirmed) == (acknowledged, acknowledged)


def test_a_slave_joins_when_the_controllers_agree() -> None:
    master = Master(log_end=100)
    master.connect("2")
    master.acknowledge("2", 50)
    assert master.ask() is None  # it has less than this master had at its election
    master.acknowledge("2", 100)
    assert master.ask() == {"1", "2"}
    assert master.ask() is None  # a request is in flight
    assert not master.replicas.enough()
    master.agree("1", "2")
    assert (master.replicas.enough(), master.acknowledged) == (True, 100)
    assert master.slaves["2"].in_sync


def test_learners_do_not_join() -> None:
    master = Master(least=1)
    master.connect("2", learner=True)
    master.acknowledge("2")
    assert master.ask() is None
    master.end = 100
    assert master.acknowledged == 100


def test_a_slave_that_is_asked_to_join_is_waited_for() -> None:
    master = Master()
    master.join("2")
    master.connect("3")
    master.acknowledge("3")
    assert master.ask() == {"1", "2", "3"}
    master.end = 100
    master.disconnect("3")
    master.acknowledge("2")
    assert (master.acknowledged, master.confirmed) == (0, 0)
    master.replicas.answered(master.replicas.number, refused=False)  # the answer is lost
    assert master.acknowledged == 0
    master.agree("1", "2", "3")
    assert master.acknowledged == 0


def test_after_a_refusal_the_slave_is_not_waited_for() -> None:
    master = Master()
    master.join("2")
    master.connect("3")
    master.acknowledge("3")
    master.ask()
    master.end = 100
    master.disconnect("3")
    master.acknowledge("2")
    master.replicas.answered(master.replicas.number, refused=True)
    assert master.acknowledged == 100


def test_a_refusal_tells_nothing_of_an_earlier_request() -> None:
    master = Master()
    master.join("2")
    number = master.replicas.number
    master.connect("3")
    master.acknowledge("3")
    assert master.ask() == {"1", "2", "3"}
    master.replicas.answered(number, refused=False)
    assert master.ask() == {"1", "2", "3"}
    master.replicas.answered(number, refused=True)
    master.disconnect("3")
    master.end = 100
    master.acknowledge("2")
    assert master.acknowledged == 0


def test_a_member_that_leaves_is_waited_for_until_the_controllers_agree() -> None:
    master = Master(least=1)
    master.join("2", "3")
    master.end = 100
    master.acknowledge("2")
    master.disconnect("3")
    master.wait(0)
    master.wait(ABSENT_MS - 1)
    assert master.ask() is None
    master.wait(1)
    assert master.ask() == {"1", "2"}
    assert master.acknowledged == 0
    master.agree("1", "2")
    assert master.acknowledged == 100


def test_a_member_that_lags_leaves() -> None:
    master = Master(least=1)
    master.join("2")
    master.end = 100
    master.wait(LAG_MS)
    assert master.ask() is None
    master.wait(1)
    assert master.ask() == {"1"}


def test_a_member_that_lost_its_log_leaves() -> None:
    master = Master(least=1)
    master.end = 100
    master.join("2")
    master.disconnect("2")
    master.connect("2")
    master.acknowledge("2", 40)
    assert master.acknowledged == 40
    assert master.ask() == {"1"}


def test_members_of_the_election_that_do_not_connect_leave() -> None:
    master = Master("2", least=1)
    master.end = 10
    assert master.acknowledged == 0
    master.wait(ABSENT_MS)
    assert master.ask() == {"1"}


def test_an_older_set_has_no_effect() -> None:
    master = Master(least=1)
    master.join("2")
    assert not master.replicas.agree(["1"], 1, master.now_ms)
    assert not master.replicas.agree(["1"], 2, master.now_ms)
    assert master.replicas.agreed == {"2"}


# --- a slave joins with everything that is acknowledged


def test_a_slave_that_lacks_acknowledged_messages_does_not_join() -> None:
    master = Master(least=1)
    master.end = 100
    assert master.acknowledged == 100
    master.connect("2")
    master.acknowledge("2", 60)
    assert master.ask() is None
    master.acknowledge("2", 100)
    assert master.ask() == {"1", "2"}


def test_sends_wait_for_a_slave_that_follows() -> None:
    """Otherwise it would always lack the last acknowledged message, and could never join."""
    master = Master(least=1)
    master.connect("2")
    master.acknowledge("2")  # it has all: nothing
    master.end = 100
    assert (master.acknowledged, master.replicas.confirm_limit()) == (0, 0)
    master.disconnect("2")
    assert (master.acknowledged, master.replicas.confirm_limit()) == (100, NO_LIMIT)


# --- requests of which the outcome is not known


@pytest.mark.parametrize("members", [(), ("2",)])
def test_another_number_ends_unknown_requests(members: tuple[str, ...]) -> None:
    master = Master(least=1)
    if members:
        master.join(*members)
    number = master.replicas.number
    master.connect("3")
    master.acknowledge("3")
    assert master.ask() == {"1", "3", *members}
    master.replicas.answered(number, refused=False)
    master.disconnect("3")
    master.end = 100
    for name in members:
        master.acknowledge(name)
    master.wait(UNKNOWN_MS)
    for name in members:
        master.acknowledge(name)
    assert (master.ask(), master.acknowledged) == (None, 0)
    master.wait(1)
    assert master.ask() == {"1", *members}  # the same set
    master.agree("1", *members)
    assert master.acknowledged == 100


def test_controllers_that_refuse_the_same_set_are_asked_for_a_smaller_one() -> None:
    master = Master(least=1)
    master.join("2")
    number = master.replicas.number
    master.connect("3")
    master.acknowledge("3")
    master.ask()
    master.replicas.answered(number, refused=False)
    master.disconnect("3")
    master.wait(UNKNOWN_MS + 1)
    assert master.ask() == {"1", "2"}
    master.replicas.answered(number, refused=True)
    assert master.ask() == {"1"}


# --- any sequence of events


class AgreedMachine(RuleBasedStateMachine):
    """Slaves connect, acknowledge and vanish; requests are lost, late, refused or agreed to.

    Each set that the controllers have has all that was acknowledged or visible.
    """

    @initialize(least=st.integers(1, 2), end=st.integers(0, 50))
    def begin(self, least: int, end: int) -> None:
        self.master = Master(least=least, log_end=end)
        self.master.end = end
        self.in_sync, self.number = frozenset({"1"}), 1
        self.on_the_way: list[tuple[frozenset[str], int]] = []
        self.has = {"1": end, "2": 0, "3": 0}
        self.promised = 0

    @rule(size=st.integers(1, 30))
    def write(self, size: int) -> None:
        self.master.end += size
        self.has["1"] = self.master.end

    @rule(name=st.sampled_from("23"))
    def connect(self, name: str) -> None:
        self.master.connect(name)

    @rule(name=st.sampled_from("23"), share=st.sampled_from([0.5, 1.0, 1.0]))
    def acknowledge(self, name: str, share: float) -> None:
        slave = self.master.slaves.get(name)
        if slave is not None and slave.connected:
            has = self.has[name] + int((self.master.end - self.has[name]) * share)
            self.has[name] = has
            self.master.acknowledge(name, has)

    @rule(name=st.sampled_from("23"))
    def disconnect(self, name: str) -> None:
        if name in self.master.slaves:
            self.master.disconnect(name)

    @rule(ms=st.sampled_from([1, 500, ABSENT_MS, LAG_MS + 1, UNKNOWN_MS]))
    def wait(self, ms: int) -> None:
        self.master.wait(ms)

    @rule()
    def ask(self) -> None:
        number = self.master.replicas.number
        wanted = self.master.ask()
        if wanted is not None:
            self.on_the_way.append((wanted, number))

    @precondition(lambda self: self.on_the_way)
    @rule(answer=st.sampled_from(["agreed", "lost", "late", "refused"]))
    def answer(self, answer: str) -> None:
        """The last request is answered, or the master does not wait any longer."""
        wanted, number = self.on_the_way.pop()
        if answer == "late":
            self.on_the_way.insert(0, (wanted, number))
        elif answer != "refused":
            self._take_effect(wanted, number)
        if answer == "agreed" and self.number == number + 1:
            self.master.replicas.agree(self.in_sync, self.number, self.master.now_ms)
        self.master.replicas.answered(number, refused=answer == "refused")

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrive_late(self) -> None:
        wanted, number = self.on_the_way[0]
        self._take_effect(wanted, number)

    @rule()
    def poll(self) -> None:
        self.master.replicas.agree(self.in_sync, self.number, self.master.now_ms)

    def _take_effect(self, wanted: frozenset[str], number: int) -> None:
        if number == self.number:
            self.in_sync, self.number = wanted, number + 1

    @invariant()
    def members_have_what_is_promised(self) -> None:
        if not hasattr(self, "master"):
            return
        # As the master service: what is acknowledged is found first, and then who may join.
        promised = max(self.master.acknowledged, self.master.confirmed)
        self.promised = max(self.promised, promised if self.master.replicas.enough() else 0)
        for name in self.in_sync:
            assert self.has[name] >= self.promised


TestAgreedMachine = AgreedMachine.TestCase
TestAgreedMachine.settings = settings(max_examples=rounds(ci=100, proof=3_000), deadline=None)
