"""Transactions against a simple model, while producers come and go and the broker dies.

A committed message is visible exactly once, a rolled back one never, none before its commit; a
request that comes again gets the answer that the model gives. Power cuts take back what was not
flushed, nothing else.
"""

import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.transaction import check_back
from tests.depth import rounds
from tests.unit.broker.transaction.test_half_recovery import die_at_the_op
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    PARKED,
    ROLLBACK,
    UNKNOWN,
    Check,
    Killed,
    Sent,
    Trade,
)

OPEN, COMMITTED, ROLLED_BACK = "open", "committed", "rolled back"
GROUPS = ("P", "Q")


@dataclass
class Deal:
    """A transaction as the model knows it: its states, with the log's end when they began."""

    body: bytes
    group: str
    handles: list[Sent]
    states: list[tuple[int, str]] = field(default_factory=list)

    @property
    def state(self) -> str:
        return self.states[-1][1]


class TransactionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(check_back, "ROLL_AFTER", 5)
        self._patch.setattr(check_back, "ROLL_RATIO", 1)
        self.home = Trade(Path(self._directory.name) / "store")
        self.home.send(body=b"first")
        self.home.flush()
        self.home.save()
        self.deals: list[Deal] = []
        self.checks: list[Check] = []
        self.client = 0
        self.sent = 0

    def teardown(self) -> None:
        try:
            for deal in self.deals:
                self.expect_end(deal, deal.handles[0], COMMIT, False)
            self.agrees()
        finally:
            self.home.close()
            self._directory.cleanup()
            self._patch.undo()

    # --- producers

    @rule(group=st.sampled_from(GROUPS), immune=st.booleans())
    def send(self, group: str, immune: bool) -> None:
        self.sent += 1
        body = b"%d" % self.sent
        properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "99999999"} if immune else {}
        sent = self.home.half(body, group, properties)
        self.deals.append(Deal(body, group, [sent], [(self.home.store.log.end, OPEN)]))

    @precondition(lambda self: self.deals)
    @rule(
        number=st.integers(0, 99), which=st.integers(0, 9),
        state=st.sampled_from([COMMIT, ROLLBACK, UNKNOWN]), checked=st.booleans(),
    )  # fmt: skip
    def end(self, number: int, which: int, state: int, checked: bool) -> None:
        deal = self.deals[number % len(self.deals)]
        self.expect_end(deal, deal.handles[which % len(deal.handles)], state, checked)

    def expect_end(self, deal: Deal, handle: Sent, state: int, checked: bool) -> None:
        answer = self.home.end(handle, state, group=deal.group, checked=checked)
        if state == UNKNOWN:
            assert answer.code == 0
            return
        wanted = COMMITTED if state == COMMIT else ROLLED_BACK
        if deal.state == OPEN:
            assert answer.remark == f"done: {wanted}", (answer, deal)
            deal.states.append((self.home.store.log.end, wanted))
        elif deal.state == wanted:
            assert answer.remark == f"done before: {wanted}", (answer, deal)
        else:
            assert answer.code == (200 if wanted == ROLLED_BACK else 201), (answer, deal)

    @precondition(lambda self: any(deal.state == OPEN for deal in self.deals))
    @rule(number=st.integers(0, 99), which=st.integers(0, 9))
    def commit_and_die(self, number: int, which: int) -> None:
        deals = [deal for deal in self.deals if deal.state == OPEN]
        deal = deals[number % len(deals)]
        die_at_the_op(self.home)
        with suppress(Killed):
            self.home.end(deal.handles[which % len(deal.handles)], COMMIT, group=deal.group)
        deal.states.append((self.home.store.log.end, COMMITTED))
        self.begin_anew()

    @precondition(lambda self: self.checks)
    @rule(number=st.integers(0, 99), state=st.sampled_from([COMMIT, ROLLBACK, UNKNOWN, UNKNOWN]))
    def answer_check(self, number: int, state: int) -> None:
        check = self.checks.pop(number % len(self.checks))
        for deal in self.deals:
            if deal.body == check.message.body:
                self.expect_end(deal, check.handle, state, True)

    @rule()
    def ask_and_die(self) -> None:
        """The broker is killed between a half that it appends again, or gives up, and the op."""
        die_at_the_op(self.home)
        with suppress(Killed):
            self.take_checks(self.home.let_pass(31_000))
        self.begin_anew()
        self.take_checks([])

    @rule(group=st.sampled_from(GROUPS))
    def come(self, group: str) -> None:
        self.client += 1
        self.home.come(self.client, group)

    @rule()
    def go(self) -> None:
        for members in self.home.context.clients.producer_groups().values():
            for member in members:
                self.home.go(member.client)

    # --- time

    @rule(seconds=st.sampled_from([1, 7, 31, 160]))
    def wait(self, seconds: int) -> None:
        self.take_checks(self.home.let_pass(seconds * 1000))

    def take_checks(self, checks: list[Check]) -> None:
        for check in checks:
            for deal in self.deals:
                if deal.body == check.message.body:
                    assert deal.state == OPEN, (check, deal)
                    if check.handle not in deal.handles:
                        deal.handles.append(check.handle)
        self.checks += checks
        parked = set(self.home.bodies(PARKED))
        for deal in self.deals:
            if deal.state == OPEN and deal.body in parked:
                deal.states.append((self.home.store.log.end, ROLLED_BACK))

    @rule()
    def flush(self) -> None:
        self.home.flush()

    @rule()
    def save(self) -> None:
        self.home.save()

    # --- ends of the broker

    @rule()
    def stop(self) -> None:
        self.home.close()
        self.begin_anew()

    @rule()
    def kill(self) -> None:
        self.begin_anew()

    @rule()
    def cut_power(self) -> None:
        flushed = self.home.store.flusher.flushed()
        self.home.cut_power()
        for deal in self.deals:
            deal.states = [(end, state) for end, state in deal.states if end <= flushed]
            deal.handles = [handle for handle in deal.handles if handle.log_offset < flushed]
        self.deals = [deal for deal in self.deals if deal.states]
        known = {deal.body for deal in self.deals}
        self.checks = [
            check
            for check in self.checks
            if check.message.body in known and check.handle.log_offset < flushed
        ]
        self.begin_anew()

    def begin_anew(self) -> None:
        self.home = self.home.restart()

    @invariant()
    def agrees(self) -> None:
        visible = Counter(
            body for queue_id in range(4) for body in self.home.bodies(queue_id=queue_id)
        )
        wanted = Counter(deal.body for deal in self.deals if deal.state == COMMITTED)
        wanted[b"first"] = 1
        assert visible == wanted
        still_open = sum(deal.state == OPEN for deal in self.deals)
        unfollowed = self.home.store.max_offset("RMQ_SYS_TRANS_HALF_TOPIC", 0)
        unfollowed -= self.home.transactions.halves.position
        assert still_open - unfollowed <= self.home.open <= still_open


TestTransactionMachine = TransactionMachine.TestCase
TestTransactionMachine.settings = settings(
    max_examples=rounds(ci=30, proof=200), stateful_step_count=40, deadline=None
)
