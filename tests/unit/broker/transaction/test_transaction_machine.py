"""Transactions against a simple model, while producers connect and disconnect and the broker dies.

A committed message is visible exactly once, a rolled back one never, none before its commit. A
repeated request gets the answer of the model. A power cut loses only what was not flushed.
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
from tests.unit.broker.transaction.test_half_recovery import die_at_op_message
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    DISCARDED,
    ROLLBACK,
    UNKNOWN,
    Check,
    Killed,
    Sent,
    TransactionFixture,
)

OPEN, COMMITTED, ROLLED_BACK = "open", "committed", "rolled back"
GROUPS = ("P", "Q")


@dataclass
class ModelTransaction:
    """A transaction in the model: its states, each with the end of the log when it began."""

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
        self._patch.setattr(check_back, "MOVE_AFTER", 5)
        self._patch.setattr(check_back, "MOVE_RATIO", 1)
        self.env = TransactionFixture(Path(self._directory.name) / "store")
        self.env.send(body=b"first")
        self.env.flush()
        self.env.save()
        self.transactions: list[ModelTransaction] = []
        self.checks: list[Check] = []
        self.client = 0
        self.sent = 0

    def teardown(self) -> None:
        try:
            for transaction in self.transactions:
                self.expect_end(transaction, transaction.handles[0], COMMIT, False)
            self.matches_model()
        finally:
            self.env.close()
            self._directory.cleanup()
            self._patch.undo()

    # --- producers

    @rule(group=st.sampled_from(GROUPS), immune=st.booleans())
    def send(self, group: str, immune: bool) -> None:
        self.sent += 1
        body = b"%d" % self.sent
        properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "99999999"} if immune else {}
        sent = self.env.half(body, group, properties)
        self.transactions.append(
            ModelTransaction(body, group, [sent], [(self.env.store.log.end, OPEN)])
        )

    @precondition(lambda self: self.transactions)
    @rule(
        number=st.integers(0, 99),
        which=st.integers(0, 9),
        state=st.sampled_from([COMMIT, ROLLBACK, UNKNOWN]),
        checked=st.booleans(),
    )
    def end(self, number: int, which: int, state: int, checked: bool) -> None:
        transaction = self.transactions[number % len(self.transactions)]
        self.expect_end(
            transaction, transaction.handles[which % len(transaction.handles)], state, checked
        )

    def expect_end(
        self, transaction: ModelTransaction, handle: Sent, state: int, checked: bool
    ) -> None:
        answer = self.env.end(handle, state, group=transaction.group, checked=checked)
        if state == UNKNOWN:
            assert answer.code == 0
            return
        wanted = COMMITTED if state == COMMIT else ROLLED_BACK
        if transaction.state == OPEN:
            assert answer.remark == wanted, (answer, transaction)
            transaction.states.append((self.env.store.log.end, wanted))
        elif transaction.state == wanted:
            assert answer.remark == f"already {wanted}", (answer, transaction)
        else:
            assert answer.code == (200 if wanted == ROLLED_BACK else 201), (answer, transaction)

    @precondition(lambda self: any(transaction.state == OPEN for transaction in self.transactions))
    @rule(number=st.integers(0, 99), which=st.integers(0, 9))
    def commit_and_die(self, number: int, which: int) -> None:
        transactions = [
            transaction for transaction in self.transactions if transaction.state == OPEN
        ]
        transaction = transactions[number % len(transactions)]
        die_at_op_message(self.env)
        with suppress(Killed):
            self.env.end(
                transaction.handles[which % len(transaction.handles)],
                COMMIT,
                group=transaction.group,
            )
        transaction.states.append((self.env.store.log.end, COMMITTED))
        self.restart()

    @precondition(lambda self: self.checks)
    @rule(number=st.integers(0, 99), state=st.sampled_from([COMMIT, ROLLBACK, UNKNOWN, UNKNOWN]))
    def answer_check(self, number: int, state: int) -> None:
        check = self.checks.pop(number % len(self.checks))
        for transaction in self.transactions:
            if transaction.body == check.message.body:
                self.expect_end(transaction, check.handle, state, True)

    @rule()
    def check_and_die(self) -> None:
        """Kill the broker between a second append, or a discard, and its op message."""
        die_at_op_message(self.env)
        with suppress(Killed):
            self.take_checks(self.env.advance(31_000))
        self.restart()
        self.take_checks([])

    @rule(group=st.sampled_from(GROUPS))
    def connect(self, group: str) -> None:
        self.client += 1
        self.env.connect(self.client, group)

    @rule()
    def disconnect(self) -> None:
        for members in self.env.context.clients.producer_groups().values():
            for member in members:
                self.env.disconnect(member.client)

    # --- time

    @rule(seconds=st.sampled_from([1, 7, 31, 160]))
    def wait(self, seconds: int) -> None:
        self.take_checks(self.env.advance(seconds * 1000))

    def take_checks(self, checks: list[Check]) -> None:
        for check in checks:
            for transaction in self.transactions:
                if transaction.body == check.message.body:
                    assert transaction.state == OPEN, (check, transaction)
                    if check.handle not in transaction.handles:
                        transaction.handles.append(check.handle)
        self.checks += checks
        discarded = set(self.env.bodies(DISCARDED))
        for transaction in self.transactions:
            if transaction.state == OPEN and transaction.body in discarded:
                transaction.states.append((self.env.store.log.end, ROLLED_BACK))

    @rule()
    def flush(self) -> None:
        self.env.flush()

    @rule()
    def save(self) -> None:
        self.env.save()

    # --- stop and restart

    @rule()
    def stop(self) -> None:
        self.env.close()
        self.restart()

    @rule()
    def kill(self) -> None:
        self.restart()

    @rule()
    def cut_power(self) -> None:
        flushed = self.env.store.flusher.flushed()
        self.env.cut_power()
        for transaction in self.transactions:
            transaction.states = [
                (end, state) for end, state in transaction.states if end <= flushed
            ]
            transaction.handles = [
                handle for handle in transaction.handles if handle.log_offset < flushed
            ]
        self.transactions = [transaction for transaction in self.transactions if transaction.states]
        known = {transaction.body for transaction in self.transactions}
        self.checks = [
            check
            for check in self.checks
            if check.message.body in known and check.handle.log_offset < flushed
        ]
        self.restart()

    def restart(self) -> None:
        self.env = self.env.restart()

    @invariant()
    def matches_model(self) -> None:
        visible = Counter(
            body for queue_id in range(4) for body in self.env.bodies(queue_id=queue_id)
        )
        wanted = Counter(
            transaction.body for transaction in self.transactions if transaction.state == COMMITTED
        )
        wanted[b"first"] = 1
        assert visible == wanted
        still_open = sum(transaction.state == OPEN for transaction in self.transactions)
        unfollowed = self.env.store.max_offset("RMQ_SYS_TRANS_HALF_TOPIC", 0)
        unfollowed -= self.env.transactions.half_messages.position
        assert still_open - unfollowed <= self.env.open <= still_open


TestTransactionMachine = TransactionMachine.TestCase
TestTransactionMachine.settings = settings(
    max_examples=rounds(ci=30, proof=200), stateful_step_count=40, deadline=None
)
