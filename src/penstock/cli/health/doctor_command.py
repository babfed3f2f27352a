"""`penstock doctor`: looks for the usual mistakes in the set-up of a cluster."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from penstock.cli.remote import ClusterOptions, cluster_options, json_option, print_json, run

if TYPE_CHECKING:
    from penstock.cli.health.doctor_rules import BrokerFacts, Finding
    from penstock.client.admin.async_admin import AsyncAdmin, BrokerAddress, GroupInfo

MEMBERS_MAX = 50
"""Members of a group that are asked for their subscriptions."""
CONNECT_S = 3.0


@dataclass(slots=True)
class Examination:
    """Findings so far, and what could not be examined."""

    findings: "list[Finding]" = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, found: "Iterable[Finding]") -> None:
        self.findings += found


@click.command()
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers and topics of this cluster.")
@click.option(
    "--skip-groups", is_flag=True, help="Do not ask the members of groups for their subscriptions."
)
@json_option
def doctor(
    cluster: ClusterOptions, in_cluster: str | None, skip_groups: bool, as_json: bool
) -> int:
    """Look for mistakes in the configuration of a cluster, and say how to correct them.

    Finds addresses that clients can't reach, NameServers that disagree, full disks, wrong clocks,
    mixed versions, brokers without a master, topics without write queues, groups whose members
    differ in their subscriptions, and low limits of Penstock's brokers. Exits with 1 if there is an
    error or a warning.
    """
    from penstock.cli.health.doctor_rules import Severity

    async def work() -> Examination:
        async with cluster.admin() as admin:
            return await _examine(admin, in_cluster, skip_groups=skip_groups)

    done = run(work())
    findings = sorted(done.findings)
    if as_json:
        print_json(_report(findings, done.skipped))
    else:
        _print(findings, done.skipped)
    return 1 if any(found.severity is not Severity.NOTE for found in findings) else 0


async def _examine(admin: "AsyncAdmin", cluster: str | None, *, skip_groups: bool) -> Examination:
    from penstock.cli.health import doctor_rules as rules
    from penstock.errors import PenstockError

    done = Examination()
    done.add(rules.examine_nameservers(await _nameserver_tables(admin)))
    try:
        brokers = await admin.brokers(cluster)
    except PenstockError as error:
        done.skipped.append(f"brokers, topics and groups: {error}")
        return done
    facts = await admin.for_each(brokers, lambda broker: _facts_of(admin, broker))
    names = {broker.name for broker in brokers}
    without = [name for name in await admin.brokers_without_master() if name in names]
    done.add(rules.examine_addresses(facts, admin.nameservers()))
    done.add(rules.examine_brokers(facts, without))
    done.add(rules.examine_limits(facts))
    if not any(one.broker.is_master and one.connect_error is None for one in facts):
        done.skipped.append("replicas, topics and groups: no master can be reached")
        return done
    try:
        if any(not broker.is_master for broker in brokers):
            done.add(rules.examine_replicas(await admin.replicas(cluster)))
        done.add(rules.examine_topics(await admin.topics(cluster=cluster)))
    except PenstockError as error:
        done.skipped.append(f"replicas and topics: {error}")
    if not skip_groups:
        await _examine_groups(admin, cluster, done)
    return done


async def _examine_groups(admin: "AsyncAdmin", cluster: str | None, done: Examination) -> None:
    from penstock.cli.health.doctor_rules import examine_subscriptions
    from penstock.cli.terminal import progress_bars
    from penstock.errors import PenstockError

    try:
        groups = await admin.groups(cluster=cluster)
    except PenstockError as error:
        done.skipped.append(f"groups: {error}")
        return
    with progress_bars() as tell:
        count = 0

        async def examine(info: "GroupInfo") -> None:
            nonlocal count
            try:
                found = await _subscriptions(admin, info.name, done.skipped)
                done.add(examine_subscriptions(info.name, found))
            except PenstockError as error:
                done.skipped.append(f"group {info.name}: {error}")
            count += 1
            tell("groups", count, len(groups))

        await admin.for_each(groups, examine)


async def _subscriptions(
    admin: "AsyncAdmin", group: str, skipped: list[str]
) -> dict[str, frozenset[tuple[str, str]]]:
    """The subscriptions of each member, as the member itself reports them."""
    from penstock.errors import PenstockError
    from penstock.wire.codes import RETRY_TOPIC_PREFIX

    members = (await admin.members(group)).members
    if len(members) < 2:
        return {}
    if len(members) > MEMBERS_MAX:
        skipped.append(f"group {group}: only {MEMBERS_MAX} of {len(members)} members were asked")
    found = {}
    for member in members[:MEMBERS_MAX]:
        try:
            info = await admin.running_info(group, member.client_id)
        except PenstockError as error:
            skipped.append(f"group {group}: the client {member.client_id} does not answer: {error}")
            continue
        found[member.client_id] = frozenset(
            (data.topic, data.sub_string or "*")
            for data in info.subscription_set
            if not data.topic.startswith(RETRY_TOPIC_PREFIX)
        )
    return found


async def _nameserver_tables(admin: "AsyncAdmin") -> dict[str, Mapping[str, object] | str]:
    """What each NameServer knows: broker addresses, and the names of topics."""
    from penstock.errors import PenstockError
    from penstock.wire import fastjson
    from penstock.wire.bodies.client_bodies import ClusterInfo, TopicList
    from penstock.wire.codes import RequestCode

    tables: dict[str, Mapping[str, object] | str] = {}
    for address in admin.nameservers():
        try:
            answer = await admin.ask(address, RequestCode.GET_BROKER_CLUSTER_INFO)
            info = fastjson.decode(answer.body, ClusterInfo)
            answer = await admin.ask(address, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
            topics = fastjson.decode(answer.body, TopicList).topic_list
        except PenstockError as error:
            tables[address] = str(error)
            continue
        table: dict[str, object] = {
            f"broker {name}": dict(data.broker_addrs)
            for name, data in info.broker_addr_table.items()
        }
        tables[address] = table | {f"topic {name}": True for name in topics}
    return tables


async def _facts_of(admin: "AsyncAdmin", broker: "BrokerAddress") -> "BrokerFacts":
    from penstock.cli.health.doctor_rules import BrokerFacts, broker_clock_ms
    from penstock.errors import PeerError, PenstockError
    from penstock.wire.java_numbers import parse_nonnegative

    problem = await _connect_error(broker.address)
    if problem is not None:
        return BrokerFacts(broker, problem, None)
    began_ms = time.time() * 1000
    try:
        info = await admin.broker_runtime_info(broker.name, broker.id)
        middle_ms = (began_ms + time.time() * 1000) / 2
        says = await admin.broker_settings(broker.name, broker.id)
    except PeerError as error:
        return BrokerFacts(broker, str(error), None)
    except PenstockError as error:
        return BrokerFacts(broker, None, str(error))
    clock_ms = broker_clock_ms(info.raw)
    version = info.version and info.version.removeprefix("V").replace("_", ".")
    if info.penstock_version is not None:
        version = f"Penstock {info.penstock_version}"
    return BrokerFacts(
        broker,
        None,
        None,
        version=version,
        disk_used=info.disk_used,
        clock_ahead_ms=None if clock_ms is None else round(clock_ms - middle_ms),
        says=says,
        open_files_max=parse_nonnegative(info.raw.get("penstockOpenFilesMax", "")),
        mapped_files_max=parse_nonnegative(info.raw.get("penstockMappedFilesMax", "")),
    )


async def _connect_error(address: str) -> str | None:
    """Why no TCP connection to an address is possible; None if it is."""
    from penstock.errors import PenstockError
    from penstock.transport.peer import split_address

    try:
        host, port = split_address(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except PenstockError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None


def _print(findings: "list[Finding]", skipped: list[str]) -> None:
    for found in findings:
        print(f"{found.severity.name.lower()}: {found.where}: {found.text}")
        print(f"    {found.next_step}")
    for text in skipped:
        print(f"not examined: {text}")
    if not findings:
        print("nothing found" + (" in what was examined" if skipped else ""))


def _report(findings: "list[Finding]", skipped: list[str]) -> object:
    from penstock.cli.schemas.health_output import DoctorFinding, DoctorReport

    return DoctorReport(
        findings=[
            DoctorFinding(
                severity=found.severity.name.lower(),  # type: ignore[arg-type]
                subject=found.subject,
                where=found.where,
                text=found.text,
                next_step=found.next_step,
            )
            for found in findings
        ],
        skipped=skipped,
    )
