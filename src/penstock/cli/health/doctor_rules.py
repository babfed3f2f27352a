"""The rules of `penstock doctor`: from facts to findings, each with a sentence and a next step."""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.client.admin.admin_values import BrokerAddress, TopicInfo, TopicKind
from penstock.client.admin.replication.admin_replication import ReplicaStatus
from penstock.plurals import count_text
from penstock.wire.codes import PERM_WRITE

CLOCK_WARNING_MS = 3_000
"""Brokers report their clock in whole seconds, and a request takes time."""
CLOCK_ERROR_MS = 60_000
DISK_WARNING = 0.75
DISK_ERROR = 0.90
"""RocketMQ refuses writes at 0.90 by default, and deletes old files early at 0.85."""
OPEN_FILES_MIN = 65_536
MAPS_MIN = 262_144
SHOWN_MAX = 20
_ANNOUNCE = "set broker.announce (brokerIP1 in broker.conf) to an address that clients reach"


class Severity(IntEnum):
    """The worst first."""

    ERROR = 0
    WARNING = 1
    NOTE = 2


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A problem and what to do about it."""

    severity: Severity
    subject: str
    where: str
    text: str
    next_step: str


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What is known about one registered broker. None is unknown."""

    broker: BrokerAddress
    connect_error: str | None
    """Why no connection can be made from here."""
    error: str | None
    """Why it refuses to say more."""
    version: str | None = None
    disk_used: float | None = None
    clock_ahead_ms: int | None = None
    says: Mapping[str, str] | None = None
    """Its settings, by RocketMQ's names."""
    open_files_max: int | None = None
    mapped_files_max: int | None = None


def examine_addresses(
    brokers: Sequence[BrokerFacts], nameservers: Sequence[str]
) -> Iterable[Finding]:
    """Addresses that brokers announce and clients can't use."""
    remote = not all(_is_loopback(address) for address in nameservers)
    for facts in brokers:
        where, address = _name(facts.broker), facts.broker.address
        if _host_of(address) in ("0.0.0.0", "::"):
            yield Finding(
                Severity.ERROR, "address", where,
                f"the broker announces {address}, which is no address of a machine",
                _ANNOUNCE,
            )  # fmt: skip
        elif remote and _is_loopback(address):
            yield Finding(
                Severity.ERROR, "address", where,
                f"the broker announces the loopback address {address}, "
                "but its NameServers are on other machines: clients there reach themselves",
                _ANNOUNCE,
            )  # fmt: skip
        if facts.connect_error is not None:
            yield Finding(
                Severity.ERROR, "address", where,
                f"the announced address {address} can't be reached from here: "
                f"{facts.connect_error}",
                "check that the broker runs, the announced address (broker.announce, brokerIP1), "
                "and firewalls between here and there",
            )  # fmt: skip
        elif facts.error is not None:
            yield Finding(
                Severity.WARNING, "access", where,
                f"the broker refuses to report its state: {facts.error}",
                "give --access-key and --secret-key of a user who may read (Get) the cluster",
            )  # fmt: skip
        yield from _other_broker(facts, where)


def _other_broker(facts: BrokerFacts, where: str) -> Iterable[Finding]:
    """Whether another broker answers at the address: two were given the same."""
    said = (facts.says or {}).get("brokerName")
    if said is not None and said != facts.broker.name:
        yield Finding(
            Severity.ERROR, "address", where,
            f"at {facts.broker.address} the broker {said} answers, not {facts.broker.name}",
            "give each broker an address and port of its own",
        )  # fmt: skip


def examine_nameservers(tables: Mapping[str, Mapping[str, object] | str]) -> Iterable[Finding]:
    """NameServers that do not answer, or whose routes differ: the facts, or an error, of each."""
    good: dict[str, Mapping[str, object]] = {}
    for address, table in tables.items():
        if isinstance(table, str):
            yield Finding(
                Severity.ERROR, "nameserver", address, f"the NameServer does not answer: {table}",
                "start it, or remove its address from the clients and brokers",
            )  # fmt: skip
        else:
            good[address] = table
    first = next(iter(good), None)
    for address, table in good.items():
        if first is None or address == first:
            continue
        differing = sorted(
            key
            for key in {*table, *good[first]}
            if table.get(key) != good[first].get(key)
        )  # fmt: skip
        if differing:
            yield Finding(
                Severity.ERROR, "routes", address,
                f"{address} and {first} disagree on {_list(differing)}",
                "make sure that every broker has all NameServers in its list (namesrvAddr); they "
                "agree about 30 s after a change",
            )  # fmt: skip


def examine_brokers(
    brokers: Sequence[BrokerFacts], without_master: Iterable[str]
) -> Iterable[Finding]:
    """Masters, disks, clocks and versions."""
    for name in without_master:
        yield Finding(
            Severity.ERROR, "master", name,
            f"no master of {name} is registered: it takes no messages",
            "start the master, or promote a slave with penstock cluster promote",
        )  # fmt: skip
    for facts in brokers:
        where, used = _name(facts.broker), facts.disk_used
        if used is not None and used >= DISK_WARNING:
            yield Finding(
                Severity.ERROR if used >= DISK_ERROR else Severity.WARNING, "disk", where,
                f"the disk is {used * 100:.0f} % full",
                "free space, or keep messages for a shorter time (retain_hours, fileReservedTime)",
            )  # fmt: skip
        ahead = facts.clock_ahead_ms
        if ahead is not None and abs(ahead) > CLOCK_WARNING_MS:
            yield Finding(
                Severity.ERROR if abs(ahead) > CLOCK_ERROR_MS else Severity.WARNING, "clock", where,
                f"its clock is {abs(ahead) / 1000:.0f} s {'ahead of' if ahead > 0 else 'behind'} "
                "the clock of this machine",
                "synchronise the clocks (NTP): delays, retention and strict signatures need them",
            )  # fmt: skip
    versions = {facts.version for facts in brokers if facts.version is not None}
    if len(versions) > 1:
        by_version = ", ".join(
            f"{version} ({_list([_name(f.broker) for f in brokers if f.version == version])})"
            for version in sorted(versions)
        )
        yield Finding(
            Severity.NOTE, "version", "cluster",
            f"the brokers have different versions: {by_version}",
            "finish the upgrade, unless the mix is intended",
        )  # fmt: skip


def examine_replicas(replicas: Iterable[ReplicaStatus]) -> Iterable[Finding]:
    """Slaves that do not follow their master."""
    for one in replicas:
        if one.broker.is_master or one.problem is not None:
            continue
        if one.error or one.in_sync is False:
            behind = "" if one.behind is None else f", {count_text(one.behind, 'byte')} behind"
            yield Finding(
                Severity.WARNING, "replication", _name(one.broker),
                f"the slave is not in sync{behind}" + (f": {one.error}" if one.error else ""),
                "see penstock cluster status, and the log of the slave",
            )  # fmt: skip


def examine_topics(topics: Iterable[TopicInfo]) -> Iterable[Finding]:
    """Topics that nobody can send to."""
    for topic in topics:
        if topic.kind is not TopicKind.NORMAL:
            continue
        if not any(s.write_queues and s.perm & PERM_WRITE for s in topic.brokers.values()):
            yield Finding(
                Severity.WARNING, "topic", topic.name,
                "the topic has no queue to write to: sends fail",
                f"penstock topic create {topic.name} --perm rw --write-queues 8, or delete it",
            )  # fmt: skip


def examine_subscriptions(
    group: str, subscriptions: Mapping[str, frozenset[tuple[str, str]]]
) -> Iterable[Finding]:
    """Members of a group must subscribe to the same: (topic, expression) by client."""
    kinds: dict[frozenset[tuple[str, str]], list[str]] = {}
    for client, found in subscriptions.items():
        kinds.setdefault(found, []).append(client)
    if len(kinds) < 2:
        return
    common = frozenset.intersection(*kinds)
    parts = []
    for kind, clients in kinds.items():
        own = (
            ", ".join(f"{topic}: {text}" for topic, text in sorted(kind - common)) or "nothing more"
        )
        parts.append(f"{_list(clients)} subscribe to {own}")
    yield Finding(
        Severity.ERROR, "subscription", group,
        f"the members of the group differ in their subscriptions, so messages are lost for some: "
        f"{'; '.join(parts)}",
        "use one group per set of subscriptions, and restart the clients with old code",
    )  # fmt: skip


def examine_limits(brokers: Iterable[BrokerFacts]) -> Iterable[Finding]:
    """Limits that a broker would reach with many topics; Apache's brokers do not report theirs."""
    for one in brokers:
        files, maps = one.open_files_max, one.mapped_files_max
        if files is not None and files < OPEN_FILES_MIN:
            yield Finding(
                Severity.NOTE, "limits", _name(one.broker),
                f"it may open {files:,} files; with many topics and connections it needs "
                f"{OPEN_FILES_MIN:,}",
                f"set LimitNOFILE={OPEN_FILES_MIN} in its systemd unit, or ulimit -n "
                f"{OPEN_FILES_MIN}, and restart it",
            )  # fmt: skip
        if maps is not None and maps < MAPS_MIN:
            yield Finding(
                Severity.NOTE, "limits", _name(one.broker),
                f"it may map {maps:,} files; with many topics it needs {MAPS_MIN:,}",
                f"set sysctl vm.max_map_count={MAPS_MIN} on its machine",
            )  # fmt: skip


_RUNTIME = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")


def broker_clock_ms(raw: Mapping[str, str]) -> int | None:
    """The broker's clock, from its start time and the time since, which is in whole seconds.

    Half a second is added: on average the broker's clock is that much further.
    """
    match = _RUNTIME.search(raw.get("runtime", ""))
    started = raw.get("bootTimestamp", "")
    if match is None or not started.isdecimal():
        return None
    days, hours, minutes, seconds = map(int, match.groups())
    elapsed_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return int(started) + elapsed_s * 1000 + 500


def _is_loopback(address: str) -> bool:
    host = _host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _name(broker: BrokerAddress) -> str:
    return broker.name if broker.is_master else f"{broker.name} slave {broker.id}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX])
    return shown if len(names) <= SHOWN_MAX else f"{shown} and {len(names) - SHOWN_MAX} more"
