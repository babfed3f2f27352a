"""Findings of `penstock doctor`."""

from penstock.cli.health import doctor_rules as rules
from penstock.cli.health.doctor_rules import BrokerFacts, Severity
from penstock.client.admin.admin_values import (
    BrokerAddress,
    TopicInfo,
    TopicKind,
    TopicSettings,
)
from penstock.client.admin.replication.admin_replication import ReplicaStatus


def facts(address: str = "10.0.0.5:10911", **more: object) -> BrokerFacts:
    broker = BrokerAddress("c", "broker-a", 0, address)
    known = {"connect_error": None, "error": None, **more}
    return BrokerFacts(broker, **known)  # type: ignore[arg-type]


def texts(found: object) -> list[tuple[str, str]]:
    return [(one.severity.name, one.text) for one in found]  # type: ignore[attr-defined]


def test_loopback_is_wrong_only_if_others_must_reach_it() -> None:
    here = [facts("127.0.0.1:10911")]
    assert texts(rules.examine_addresses(here, ["127.0.0.1:9876", "localhost:9877"])) == []
    ((severity, text),) = texts(rules.examine_addresses(here, ["10.0.0.1:9876"]))
    assert severity == "ERROR"
    assert "loopback address 127.0.0.1:10911" in text
    assert len(texts(rules.examine_addresses([facts("[::1]:1")], ["10.0.0.1:9876"]))) == 1


def test_addresses_that_do_not_work() -> None:
    names = ["10.0.0.1:9876"]
    assert texts(rules.examine_addresses([facts()], names)) == []
    ((_, text),) = texts(rules.examine_addresses([facts(connect_error="refused")], names))
    assert text == "the announced address 10.0.0.5:10911 can't be reached from here: refused"
    ((severity, text),) = texts(rules.examine_addresses([facts(error="no right")], names))
    assert (severity, text) == ("WARNING", "the broker refuses to report its state: no right")
    ((_, text),) = texts(rules.examine_addresses([facts("0.0.0.0:10911")], names))
    assert "is no address of a machine" in text
    ((_, text),) = texts(rules.examine_addresses([facts(says={"brokerName": "other"})], names))
    assert text == "at 10.0.0.5:10911 the broker other answers, not broker-a"


def test_nameservers_that_differ() -> None:
    same = {"broker a": {0: "x:1"}, "topic t": True}
    assert list(rules.examine_nameservers({"n:1": same, "n:2": dict(same)})) == []
    found = texts(
        rules.examine_nameservers({"n:1": same, "n:2": {"broker a": {}}, "n:3": "refused"})
    )
    assert found == [
        ("ERROR", "the NameServer does not answer: refused"),
        ("ERROR", "n:2 and n:1 disagree on broker a, topic t"),
    ]


def test_long_lists_are_cut() -> None:
    many = {f"topic {number:03}": True for number in range(50)}
    ((_, text),) = texts(rules.examine_nameservers({"n:1": many, "n:2": {}}))
    assert text.endswith("topic 019 and 30 more")


def test_disks_clocks_and_versions() -> None:
    assert list(rules.examine_brokers([facts(disk_used=0.5, clock_ahead_ms=-2000)], [])) == []
    assert list(rules.examine_brokers([facts()], [])) == [], "unknown is no finding"
    found = texts(
        rules.examine_brokers(
            [
                facts(disk_used=0.8, clock_ahead_ms=-5_000, version="5.4.0"),
                facts(disk_used=0.95, clock_ahead_ms=120_000, version="Penstock 0.1"),
            ],
            ["broker-z"],
        )
    )
    assert found == [
        ("ERROR", "no master of broker-z is registered: it takes no messages"),
        ("WARNING", "the disk is 80 % full"),
        ("WARNING", "its clock is 5 s behind the clock of this machine"),
        ("ERROR", "the disk is 95 % full"),
        ("ERROR", "its clock is 120 s ahead of the clock of this machine"),
        ("NOTE", "the brokers have different versions: 5.4.0 (broker-a), Penstock 0.1 (broker-a)"),
    ]


def test_the_clock_of_a_broker() -> None:
    raw = {"bootTimestamp": "1000", "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]"}
    assert rules.broker_clock_ms(raw) == 1000 + 93_784_000 + 500
    assert rules.broker_clock_ms({**raw, "runtime": "soon"}) is None
    assert rules.broker_clock_ms({}) is None


def test_slaves_that_do_not_follow() -> None:
    slave = BrokerAddress("c", "broker-a", 1, "h:2")
    assert list(rules.examine_replicas([ReplicaStatus(slave, in_sync=None)])) == []
    ((_, text),) = texts(
        rules.examine_replicas([ReplicaStatus(slave, in_sync=False, behind=9, error="gone")])
    )
    assert text == "the slave is not in sync, 9 bytes behind: gone"


def topic(kind: TopicKind, *settings: tuple[int, int]) -> TopicInfo:
    brokers = {
        f"b{number}": TopicSettings(8, queues, perm, False, {})
        for number, (queues, perm) in enumerate(settings)
    }
    return TopicInfo("t", kind, brokers)


def test_topics_without_write_queues() -> None:
    normal = TopicKind.NORMAL
    assert (
        list(rules.examine_topics([topic(normal, (0, 6), (1, 2)), topic(TopicKind.DLQ, (1, 4))]))
        == []
    )
    found = list(rules.examine_topics([topic(normal, (0, 6), (8, 4))]))
    assert [one.where for one in found] == ["t"]


def test_members_that_differ() -> None:
    a, b = frozenset({("t", "*"), ("u", "*")}), frozenset({("t", "*"), ("u", "x")})
    assert list(rules.examine_subscriptions("g", {"1": a, "2": a})) == []
    assert list(rules.examine_subscriptions("g", {})) == []
    ((severity, text),) = texts(rules.examine_subscriptions("g", {"1": a, "2": b, "3": a}))
    assert severity == "ERROR"
    assert text.endswith("1, 3 subscribe to u: *; 2 subscribe to u: x")


def test_limits_are_those_that_the_broker_reports() -> None:
    assert list(rules.examine_limits([facts()])) == []
    assert (
        list(rules.examine_limits([facts(open_files_max=1 << 20, mapped_files_max=1 << 20)])) == []
    )
    found = list(rules.examine_limits([facts(open_files_max=1024, mapped_files_max=65_530)]))
    assert {(one.severity, one.where) for one in found} == {(Severity.NOTE, "broker-a")}
    assert [one.text.partition(";")[0] for one in found] == [
        "it may open 1,024 files",
        "it may map 65,530 files",
    ]
