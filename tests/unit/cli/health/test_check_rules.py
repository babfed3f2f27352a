"""From figures to OK, WARNING, CRITICAL or UNKNOWN."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from penstock.cli.health import check_rules as rules
from penstock.cli.health.check_command import check
from penstock.cli.health.check_rules import (
    CheckResult,
    FailedCheck,
    Figure,
    GroupLag,
    Limits,
    State,
)
from penstock.client.admin.admin_cluster import read_runtime_info
from penstock.client.admin.admin_values import (
    BrokerAddress,
    BrokerState,
    GroupProgress,
    QueueProgress,
)
from penstock.client.admin.replication.admin_replication import ReplicaStatus
from penstock.errors import NoPermission, PeerTimeout
from penstock.wire.bodies.client_bodies import MessageQueue

MASTER = BrokerAddress("c", "broker-a", 0, "h:1")
SLAVE = BrokerAddress("c", "broker-a", 1, "h:2")


def broker(address: BrokerAddress = MASTER, disk: str = "0.5") -> BrokerState:
    return BrokerState(address, read_runtime_info({"commitLogDiskRatio": disk}))


def states(checked: CheckResult) -> list[State]:
    return [problem.state for problem in checked.problems]


@pytest.mark.parametrize(
    ("value", "state"),
    [(0, State.OK), (10, State.OK), (10.1, State.WARNING), (20, State.WARNING),
     (21, State.CRITICAL), (None, State.UNKNOWN)],
)  # fmt: skip
def test_thresholds(value: float | None, state: State) -> None:
    assert Limits(10, 20).judge(value) is state


def test_a_value_without_thresholds_is_not_checked() -> None:
    assert Limits().judge(10**9) is State.OK
    assert Limits().judge(None) is State.OK
    assert Limits(critical=5).judge(6) is State.CRITICAL


def test_the_worst_state_counts_and_unknown_is_the_least() -> None:
    def of(*found: State) -> CheckResult:
        return CheckResult(tuple(FailedCheck(state, state.name.lower()) for state in found))

    assert of().state is State.OK
    assert of(State.UNKNOWN).state is State.UNKNOWN
    assert of(State.UNKNOWN, State.WARNING).state is State.WARNING
    assert of(State.WARNING, State.CRITICAL, State.UNKNOWN).state is State.CRITICAL
    line = of(State.UNKNOWN, State.WARNING, State.CRITICAL).line("fine")
    assert line == "CRITICAL - critical; warning; unknown"
    assert of().line("fine") == "OK - fine"


def test_the_line_has_one_bar_and_no_line_break() -> None:
    checked = CheckResult(
        (FailedCheck(State.WARNING, "a|b\nc"),),
        (
            Figure("lag_it's=x", 4, Limits(10, None)),
            Figure("disk_a", 43.25, Limits(75, 90), "%", 100),
            Figure("behind_g", None, Limits(5, 9), "s"),
        ),
    )
    assert checked.line("") == (
        "WARNING - a/b c | 'lag_it_s_x'=4;10;;0 'disk_a'=43.25%;75;90;0;100 'behind_g'=U;5;9;0"
    )


def test_brokers() -> None:
    good = rules.check_brokers([broker(), broker(SLAVE)], [], 1)
    assert (good.problems, [figure.value for figure in good.figures]) == ((), [1, 2])
    down = BrokerState(MASTER, None, PeerTimeout("h:1: no answer"))
    assert states(rules.check_brokers([down], [], 1)) == [State.CRITICAL]
    secret = BrokerState(MASTER, None, NoPermission("no right"))
    assert states(rules.check_brokers([secret], [], 1)) == [State.UNKNOWN]
    assert states(rules.check_brokers([broker(SLAVE)], ["broker-a"], 0)) == [State.CRITICAL]
    fewer = rules.check_brokers([broker()], [], 2)
    assert fewer.problems[0].text == "1 master is registered, 2 expected"


def test_disks() -> None:
    limits = Limits(75, 90)
    assert rules.check_disks([broker(disk="0.75")], limits).problems == ()
    assert states(rules.check_disks([broker(disk="0.76")], limits)) == [State.WARNING]
    assert states(rules.check_disks([broker(disk="0.91")], limits)) == [State.CRITICAL]
    assert states(rules.check_disks([broker(disk="x")], limits)) == [State.UNKNOWN]
    assert rules.check_disks([BrokerState(MASTER, None)], limits) == CheckResult()


def test_replicas() -> None:
    master = ReplicaStatus(MASTER)
    slave = ReplicaStatus(SLAVE, in_sync=True, behind=0)
    assert rules.check_replicas([master, slave], 1).problems == ()
    late = replace(slave, in_sync=False, behind=7)
    found = rules.check_replicas([master, late], 1)
    assert states(found) == [State.WARNING, State.CRITICAL]
    assert found.problems[0].text == "slave 1 of broker-a is not in sync (7 bytes behind)"
    assert states(rules.check_replicas([master, late], None)) == [State.WARNING]
    unclear = replace(slave, in_sync=None)
    assert states(rules.check_replicas([master, unclear], 1)) == [State.UNKNOWN]
    assert states(rules.check_replicas([master], 1)) == [State.CRITICAL]
    broken = replace(slave, error="epochs differ")
    assert "epochs differ" in rules.check_replicas([master, broken], None).problems[0].text


def test_lag() -> None:
    groups = [GroupLag("g", 11, 3.0), GroupLag("h", None, None)]
    checked = rules.check_lag(groups, Limits(10), Limits(critical=2))
    assert states(checked) == [State.WARNING, State.CRITICAL, State.UNKNOWN, State.UNKNOWN]
    assert checked.problems[0].text == "the lag of the group g is 11 messages"
    assert rules.check_lag(groups, Limits(), Limits()) == CheckResult()


def queue(max_offset: int, committed: int | None, lag_ms: int | None) -> QueueProgress:
    at = MessageQueue("t", "broker-a", 0)
    return QueueProgress(at, max_offset, committed, committed, lag_ms, None)


def test_the_lag_of_a_group() -> None:
    def of(*queues: QueueProgress, unreachable: tuple[str, ...] = ()) -> tuple[object, object]:
        lag = rules.lag_of(GroupProgress("g", queues, 0.0, unreachable))
        return lag.messages, lag.seconds

    assert of() == (0, 0)
    assert of(queue(10, 4, 2500), queue(5, 5, 0)) == (6, 2.5)
    assert of(queue(10, 4, 2500), queue(0, None, None)) == (6, 2.5), "an empty queue has no lag"
    assert of(queue(10, None, None)) == (None, None)
    assert of(queue(10, 4, None)) == (6, None)
    assert of(queue(10, 4, 1), unreachable=("broker-b",)) == (None, None)


def test_dead_letters() -> None:
    checked = rules.check_dead_letters([("g", 3), ("h", 0), ("i", None)], Limits(0, 100))
    assert states(checked) == [State.WARNING, State.UNKNOWN]
    assert checked.problems[0].text == "the group g has 3 dead letters"


@pytest.mark.parametrize(
    "arguments",
    [("--disk-warning", "x"), ("--lag-warning", "-1"), ("--access-key", "only"),
     ("--context", "not there")],
)  # fmt: skip
def test_what_can_not_be_checked_is_unknown(
    arguments: tuple[str, ...], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG_DIR", str(tmp_path))
    assert CliRunner().invoke(check, list(arguments)).exit_code == 3
