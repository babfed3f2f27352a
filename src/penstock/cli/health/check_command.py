"""`penstock check`: the state of a cluster for Nagios, Icinga and Kubernetes probes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.name_completion import group_names
from penstock.cli.remote import ClusterOptions, cluster_options, json_option, print_json, run
from penstock.errors import NoNameServer, NoRoute, PeerError, PenstockError
from penstock.plurals import count_text

if TYPE_CHECKING:
    from penstock.cli.health.check_rules import CheckResult, Limits
    from penstock.client.admin.async_admin import AsyncAdmin

F = TypeVar("F", bound=Callable[..., Any])
_UNKNOWN = 3


class CheckCommand(click.Command):
    """Exits with 3 if it can't check: the usual codes 1 and 2 would mean WARNING and CRITICAL."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **more: Any,
    ) -> click.Context:
        with _unknown_on_failure():
            return super().make_context(info_name, args, parent, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with _unknown_on_failure():
            return super().invoke(ctx)


@contextlib.contextmanager
def _unknown_on_failure() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        error.show()
    except (PenstockError, OSError) as error:
        print(f"UNKNOWN - {' '.join(str(error).replace('|', '/').split())}")
    else:
        return
    raise click.exceptions.Exit(_UNKNOWN)


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What is checked, and the thresholds."""

    cluster: str | None
    masters: int
    in_sync_slaves: int | None
    groups: Sequence[str]
    disk: "Limits"
    lag: "Limits"
    behind: "Limits"
    dead_letters: "Limits"


def _limit(name: str, what: str, default: float | None, level: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}-{level}",
        type=click.FloatRange(0),
        default=default,
        show_default=default is not None,
        help=f"{level.upper()} if {what} exceeds this.",
    )


def _limits(
    name: str, what: str, warning: float | None = None, critical: float | None = None
) -> Callable[[F], F]:
    """Add the two options of a threshold."""

    def add(command: F) -> F:
        inner = _limit(name, what, critical, "critical")(command)
        return _limit(name, what, warning, "warning")(inner)

    return add


@click.command(cls=CheckCommand)
@cluster_options
@click.option("-c", "--cluster", "in_cluster", help="Only brokers of this cluster.")
@click.option(
    "--masters", type=click.IntRange(0), default=1, show_default=True,
    help="CRITICAL if fewer masters are registered.",
)  # fmt: skip
@click.option(
    "--in-sync-slaves", type=click.IntRange(0),
    help="CRITICAL if a master has fewer slaves in sync.",
)  # fmt: skip
@click.option(
    "-g", "--group", "groups", multiple=True, shell_complete=group_names,
    help="Group whose lag and dead letters are checked. Can be repeated.  [default: all]",
)  # fmt: skip
@_limits("disk", "the used share of a disk in percent", 75, 90)
@_limits("lag", "the number of messages that a group has not consumed")
@_limits("behind", "the age in seconds of the oldest message that a group has not consumed")
@_limits("dead-letters", "the number of dead letters of a group")
@json_option
def check(
    cluster: ClusterOptions,
    in_cluster: str | None,
    masters: int,
    in_sync_slaves: int | None,
    groups: tuple[str, ...],
    as_json: bool,
    **limits: Any,
) -> int:
    """Check a cluster: brokers, disks, replicas; lag and dead letters if thresholds are given.

    Prints one line for Nagios and exits with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN).
    """
    from penstock.cli.health.check_rules import CheckResult, FailedCheck, Limits, State

    def pair(name: str) -> Limits:
        warning, critical = limits[f"{name}_warning"], limits[f"{name}_critical"]
        if None not in (warning, critical) and warning > critical:
            option = name.replace("_", "-")
            raise click.UsageError(
                f"--{option}-warning ({warning:g}) must not exceed --{option}-critical "
                f"({critical:g})"
            )
        return Limits(limits[f"{name}_warning"], limits[f"{name}_critical"])

    plan = CheckPlan(
        cluster=in_cluster,
        masters=masters,
        in_sync_slaves=in_sync_slaves,
        groups=groups,
        disk=pair("disk"),
        lag=pair("lag"),
        behind=pair("behind"),
        dead_letters=pair("dead_letters"),
    )

    async def work() -> "tuple[CheckResult, str]":
        async with cluster.admin() as admin:
            return await _check(admin, plan)

    try:
        checked, summary = run(work())
    except PenstockError as error:
        down = isinstance(error, PeerError | NoNameServer | NoRoute)
        state = State.CRITICAL if down else State.UNKNOWN
        checked, summary = CheckResult((FailedCheck(state, error.remark()),)), ""
    if as_json:
        print_json(_report(checked, summary))
    else:
        print(checked.line(summary))
    return int(checked.state)


async def _check(admin: "AsyncAdmin", plan: CheckPlan) -> "tuple[CheckResult, str]":
    from penstock.cli.health import check_rules

    state = await admin.cluster(plan.cluster)
    names = {one.broker.name for one in state.brokers}
    without = [name for name in await admin.brokers_without_master() if name in names]
    checked = check_rules.check_brokers(state.brokers, without, plan.masters)
    checked += check_rules.check_disks(state.brokers, plan.disk)
    if plan.in_sync_slaves is not None or any(not one.broker.is_master for one in state.brokers):
        replicas = await admin.replicas(plan.cluster)
        checked += check_rules.check_replicas(replicas, plan.in_sync_slaves)
    by_group = plan.lag.given or plan.behind.given or plan.dead_letters.given
    if by_group and any(one.broker.is_master and one.problem is None for one in state.brokers):
        checked += await _check_groups(admin, plan)
    count = len(state.brokers)
    return checked, f"{count_text(count, 'broker')} {'answers' if count == 1 else 'answer'}"


async def _check_groups(admin: "AsyncAdmin", plan: CheckPlan) -> "CheckResult":
    from penstock.cli.health import check_rules

    known = [info.name for info in await admin.groups(cluster=plan.cluster)]
    groups = [name for name in plan.groups or known if name in known]
    checked = check_rules.check_existence(set(plan.groups) - set(known))
    if plan.lag.given or plan.behind.given:
        progress = await admin.for_each(groups, admin.progress)
        lags = [check_rules.lag_of(one) for one in progress]
        checked += check_rules.check_lag(lags, plan.lag, plan.behind)
    if plan.dead_letters.given:
        counts = await _dead_letters(admin, plan)
        checked += check_rules.check_dead_letters(counts, plan.dead_letters)
    return checked


async def _dead_letters(admin: "AsyncAdmin", plan: CheckPlan) -> list[tuple[str, int | None]]:
    """The number of dead letters by group, of all groups that have a dead letter topic."""
    from penstock.client.admin.async_admin import TopicKind
    from penstock.wire.codes import DLQ_TOPIC_PREFIX

    found: list[tuple[str, int | None]] = []
    for topic in await admin.topics(kind=TopicKind.DLQ, cluster=plan.cluster):
        group = topic.name.removeprefix(DLQ_TOPIC_PREFIX)
        if plan.groups and group not in plan.groups:
            continue
        described = await admin.describe_topic(topic.name)
        count = sum(state.count for state in described.queues)
        found.append((group, None if described.unreachable else count))
    return found


def _report(checked: "CheckResult", summary: str) -> object:
    from penstock.cli.schemas.health_output import CheckFigure, CheckProblem, CheckReport

    problems = [
        CheckProblem(state=problem.state.name, text=problem.text)  # type: ignore[arg-type]
        for problem in checked.ordered()
    ]
    return CheckReport(
        state=checked.state.name,  # type: ignore[arg-type]
        text="; ".join(problem.text for problem in problems) or summary,
        problems=problems,
        figures=[
            CheckFigure(
                name=figure.name,
                value=figure.value,
                unit=figure.unit,
                warning=figure.limits.warning,
                critical=figure.limits.critical,
            )
            for figure in checked.figures
        ],
    )
