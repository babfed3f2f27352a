"""The Home page: figures, alarms, charts."""

import asyncio
import contextlib

from penstock.client.admin.admin_values import TopicKind
from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.monitoring.alarms import find_alarms

FIRST_SNAPSHOT_S = 0.6
"""How long the first page waits for the first snapshot."""
BEHIND_SHOWN = 8


async def first_snapshot(call: ApiCall) -> None:
    """Wait a moment if there is no snapshot yet."""
    if not call.console.watch.updated.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call.console.watch.updated.wait(), FIRST_SNAPSHOT_S)


@endpoint(
    "GET",
    "/overview",
    parameters={"since_ms": "only samples of the history after this time"},
)
async def overview(call: ApiCall) -> object:
    """Rates, lag, disk, alarms, the groups that are furthest behind, and the last hour.

    `lag` is a number of messages; `lag_ms` is the age of the oldest of them. All groups are
    measured once in `lag_round_s`, or in `lag_round_idle_s` while nobody uses the console.
    """
    await first_snapshot(call)
    watch = call.console.watch
    at = watch.snapshot
    behind = sorted((row for row in at.lags() if row[1].lag), key=lambda row: -(row[1].lag_ms or 0))
    applications = [info for info in at.topics.values() if info.kind is TopicKind.NORMAL]
    groups = [info for info in at.groups.values() if not info.is_system]
    round_s, round_idle_s = watch.lag_rounds_s()
    return {
        "ready": watch.updated.is_set(),
        "at_ms": at.at_ms or None,
        "problem": at.problem or None,
        "nameservers": list(call.console.admin.nameservers()),
        "clusters": list(at.cluster.clusters),
        "brokers": len(at.cluster.brokers),
        "brokers_answering": sum(state.problem is None for state in at.cluster.brokers),
        "topics": len(applications),
        "groups": len(groups),
        "groups_measured": sum(info.name in at.group_figures for info in groups),
        "rate_in": at.rate_in,
        "rate_out": at.rate_out,
        "lag": at.lag,
        "lag_ms": at.lag_ms,
        "disk_used": at.disk_used,
        "stored_today": _sum_today(call),
        "alarms": [
            {"severity": a.severity, "sentence": a.sentence, "link": a.link}
            for a in find_alarms(at)
        ],
        "behind": [
            {"group": name, "lag": f.lag, "lag_ms": f.lag_ms, "members": f.members}
            for name, f in behind[:BEHIND_SHOWN]
        ],
        "history": watch.history.since(call.number("since_ms", 0, most=2**62)),
        "interval_s": call.console.settings.interval_s,
        "lag_round_s": round_s,
        "lag_round_idle_s": round_idle_s,
    }


def _sum_today(call: ApiCall) -> int | None:
    infos = [state.runtime_info for state in call.console.watch.snapshot.masters]
    known = [info.put_today for info in infos if info is not None and info.put_today is not None]
    return sum(known) if known and len(known) == len(infos) else None


@endpoint("GET", "/names", parameters={"query": "text that the names contain"})
async def names(call: ApiCall) -> object:
    """Topics and groups whose name contains a text, for the search of the command palette."""
    await first_snapshot(call)
    at = call.console.watch.snapshot
    query = call.text("query").lower()
    size = 20
    topics = (
        name
        for name, info in at.topics.items()
        if info.kind is TopicKind.NORMAL and query in name.lower()
    )
    groups = (
        name for name, info in at.groups.items() if not info.is_system and query in name.lower()
    )
    return {
        "topics": [name for name, _ in zip(topics, range(size), strict=False)],
        "groups": [name for name, _ in zip(groups, range(size), strict=False)],
    }
