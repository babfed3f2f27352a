"""The rules of `penstock check`: from figures to OK, WARNING, CRITICAL or UNKNOWN.

The output follows the guidelines of Nagios plugins: one line `STATE - text | performance data`. The
state is the worst of all checks. WARNING and CRITICAL come before UNKNOWN: a known problem matters
more than a value that could not be determined.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.client.admin.admin_values import BrokerState, GroupProgress
from penstock.client.admin.replication.admin_replication import ReplicaStatus
from penstock.errors import PeerError
from penstock.plurals import count_text


class State(IntEnum):
    """The values are the exit codes."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_ORDER = (State.CRITICAL, State.WARNING, State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Limits:
    """Two thresholds: a value above them is a problem. None is not checked."""

    warning: float | None = None
    critical: float | None = None

    @property
    def given(self) -> bool:
        return self.warning is not None or self.critical is not None

    def judge(self, value: float | None) -> State:
        """The state of a value; an unknown one is UNKNOWN if it is to be checked."""
        if value is None:
            return State.UNKNOWN if self.given else State.OK
        if self.critical is not None and value > self.critical:
            return State.CRITICAL
        if self.warning is not None and value > self.warning:
            return State.WARNING
        return State.OK


@dataclass(frozen=True, slots=True)
class Figure:
    """One value of the performance data."""

    name: str
    value: float | None
    limits: Limits = Limits()
    unit: str = ""
    top: float | None = None

    def text(self) -> str:
        """As Nagios reads it: 'name'=value;warning;critical;least;most."""
        name = self.name.replace("'", "_").replace("=", "_").replace("|", "_")
        value = "U" if self.value is None else f"{_number(self.value)}{self.unit}"
        limits = (self.limits.warning, self.limits.critical, 0, self.top)
        pieces = ["" if limit is None else _number(limit) for limit in limits]
        return f"'{name}'={';'.join([value, *pieces]).rstrip(';')}"


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A check that is not OK."""

    state: State
    text: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Problems and figures of one or several checks."""

    problems: tuple[FailedCheck, ...] = ()
    figures: tuple[Figure, ...] = ()

    def __add__(self, other: "CheckResult") -> "CheckResult":
        return CheckResult(self.problems + other.problems, self.figures + other.figures)

    @property
    def state(self) -> State:
        found = {problem.state for problem in self.problems}
        return next((state for state in _ORDER if state in found), State.OK)

    def ordered(self) -> list[FailedCheck]:
        """The worst first."""
        return sorted(self.problems, key=lambda problem: _ORDER.index(problem.state))

    def line(self, summary: str) -> str:
        """The one line of output; `summary` is the text if all is well."""
        text = "; ".join(problem.text for problem in self.ordered()) or summary
        clean = " ".join(text.replace("|", "/").split())
        data = " ".join(figure.text() for figure in self.figures)
        return f"{self.state.name} - {clean}" + (f" | {data}" if data else "")


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group; None is unknown."""

    name: str
    messages: int | None
    seconds: float | None


def lag_of(progress: GroupProgress) -> GroupLag:
    """The lag of a group. A queue that is empty has none, even without an offset."""
    if progress.unreachable:
        return GroupLag(progress.group, None, None)
    queues = [at for at in progress.queues if at.committed is not None or at.max_offset > 0]
    counts, ages = [at.lag for at in queues], [at.lag_ms for at in queues]
    known_counts = [count for count in counts if count is not None]
    known_ages = [age for age in ages if age is not None]
    return GroupLag(
        progress.group,
        sum(known_counts) if len(known_counts) == len(counts) else None,
        max(known_ages, default=0) / 1000 if len(known_ages) == len(ages) else None,
    )


# --- the checks


def check_brokers(
    states: Sequence[BrokerState], without_master: Iterable[str], masters_min: int
) -> CheckResult:
    """Whether all registered brokers answer, and enough masters are registered."""
    problems = []
    for state in states:
        if isinstance(state.problem, PeerError):
            text = f"{_name(state)} does not answer: {state.problem}"
            problems.append(FailedCheck(State.CRITICAL, text))
        elif state.problem is not None:  # it runs, but refuses the request
            text = f"{_name(state)} does not report its state: {state.problem}"
            problems.append(FailedCheck(State.UNKNOWN, text))
    problems += [FailedCheck(State.CRITICAL, f"{name} has no master") for name in without_master]
    masters = sum(state.broker.is_master for state in states)
    registered = f"{count_text(masters, 'master')} {'is' if masters == 1 else 'are'}"
    if masters < masters_min:
        problems.append(
            FailedCheck(State.CRITICAL, f"{registered} registered, {masters_min} expected")
        )
    answering = sum(state.problem is None for state in states)
    figures = (Figure("masters", masters), Figure("brokers", answering))
    return CheckResult(tuple(problems), figures)


def check_disks(states: Iterable[BrokerState], limits: Limits) -> CheckResult:
    """The used share of the disk of each broker that answers, in percent."""
    checked = CheckResult()
    for state in states:
        info = state.runtime_info
        if info is None:
            continue
        used = None if info.disk_used is None else round(info.disk_used * 100, 1)
        figure = Figure(f"disk_{_short(state)}", used, limits, "%", 100)
        text = f"the disk of {_name(state)} is {used} % full"
        if used is None:
            text = f"the disk use of {_name(state)} is unknown"
        checked += _judged(figure, text)
    return checked


def check_replicas(replicas: Sequence[ReplicaStatus], in_sync_min: int | None) -> CheckResult:
    """Whether slaves are in sync, and each master has enough of them."""
    problems = []
    masters = [one for one in replicas if one.broker.is_master]
    slaves = [one for one in replicas if not one.broker.is_master and one.problem is None]
    for slave in slaves:
        name = f"slave {slave.broker.id} of {slave.broker.name}"
        if slave.error:
            problems.append(FailedCheck(State.WARNING, f"{name} can't follow: {slave.error}"))
        elif slave.in_sync is False:
            behind = "" if slave.behind is None else f" ({count_text(slave.behind, 'byte')} behind)"
            problems.append(FailedCheck(State.WARNING, f"{name} is not in sync{behind}"))
    for master in masters if in_sync_min is not None else ():
        own = [one for one in slaves if one.broker.name == master.broker.name]
        sure = sum(one.in_sync is True for one in own)
        unknown = sum(one.in_sync is None for one in own)
        assert in_sync_min is not None
        if sure + unknown < in_sync_min:
            found = count_text(sure, "slave")
            text = f"{master.broker.name} has {found} in sync, {in_sync_min} expected"
            problems.append(FailedCheck(State.CRITICAL, text))
        elif sure < in_sync_min:
            wanted = count_text(in_sync_min, "slave")
            text = f"it is unknown whether {master.broker.name} has {wanted} in sync"
            problems.append(FailedCheck(State.UNKNOWN, text))
    in_sync = sum(one.in_sync is True for one in slaves)
    return CheckResult(tuple(problems), (Figure("slaves_in_sync", in_sync),) if slaves else ())


def check_existence(missing: Iterable[str]) -> CheckResult:
    """Groups that were named, but do not exist: probably a typing error."""
    problems = [FailedCheck(State.UNKNOWN, f"there is no group {name}") for name in sorted(missing)]
    return CheckResult(tuple(problems))


def check_lag(groups: Iterable[GroupLag], messages: Limits, seconds: Limits) -> CheckResult:
    """The lag of groups, in messages and in seconds."""
    checked = CheckResult()
    for group in groups:
        if messages.given:
            count = "unknown" if group.messages is None else count_text(group.messages, "message")
            figure = Figure(f"lag_{group.name}", group.messages, messages)
            checked += _judged(figure, f"the lag of the group {group.name} is {count}")
        if seconds.given:
            age = "an unknown time" if group.seconds is None else f"{group.seconds:.0f} s"
            figure = Figure(f"behind_{group.name}", group.seconds, seconds, "s")
            checked += _judged(figure, f"the group {group.name} is behind by {age}")
    return checked


def check_dead_letters(counts: Iterable[tuple[str, int | None]], limits: Limits) -> CheckResult:
    """The number of dead letters of each group."""
    checked = CheckResult()
    for group, count in counts:
        letters = "dead letter"
        shown = f"an unknown number of {letters}s" if count is None else count_text(count, letters)
        figure = Figure(f"dead_letters_{group}", count, limits)
        checked += _judged(figure, f"the group {group} has {shown}")
    return checked


def _judged(figure: Figure, text: str) -> CheckResult:
    state = figure.limits.judge(figure.value)
    return CheckResult((FailedCheck(state, text),) if state is not State.OK else (), (figure,))


def _name(state: BrokerState) -> str:
    broker = state.broker
    kind = "" if broker.is_master else f" slave {broker.id}"
    return f"{broker.name}{kind} ({broker.address})"


def _short(state: BrokerState) -> str:
    broker = state.broker
    return broker.name if broker.is_master else f"{broker.name}_{broker.id}"


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
