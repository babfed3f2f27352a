"""The snapshot: a fixed number of requests per interval, unknown values, failures."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client.admin.admin_core import BrokerResults
from penstock.client.admin.async_admin import (
    ClusterState,
    Election,
    ElectionHistory,
    GroupMembers,
    GroupProgress,
    QueueProgress,
)
from penstock.console.monitoring import cluster_watch as watch_module
from penstock.console.monitoring.cluster_watch import (
    GROUPS_PER_INTERVAL,
    IDLE_BEHIND,
    IDLE_GROUPS,
    TOPICS_PER_INTERVAL,
    ClusterWatch,
)
from penstock.errors import PeerUnreachable
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import TopicOffset, TopicStatsTable
from penstock.wire.bodies.client_bodies import MessageQueue
from tests.unit.console.console_kit import BROKER, FakeAdmin, broker_state, group, topic


def stats(stored: int) -> Callable[..., Any]:
    def answer(brokers: Any, code: int, fields: dict[str, str]) -> BrokerResults[Any]:
        queue = MessageQueue(fields["topic"], "broker-a", 0)
        ends = TopicOffset(min_offset=10, max_offset=stored, last_update_timestamp=5)
        body = fastjson.encode(TopicStatsTable(offset_table={queue: ends}))
        return BrokerResults([(BROKER, SimpleNamespace(body=body))], ())

    return answer


@pytest.fixture
def admin() -> FakeAdmin:
    found = FakeAdmin()
    found.answers = {
        "cluster": ClusterState(("n:1",), (broker_state(put_tps=3.0),)),
        "topics": [topic(f"t{number:03}") for number in range(500)],
        "groups": lambda system: [group(f"g{number:03}") for number in range(120)],
        "replicas": (),
        "election_histories": (),
        "ask_each": stats(30),
        "progress": lambda name: GroupProgress(name, (), 0.0),
        "members": lambda name: GroupMembers(name, (), (), None, None, None),
    }
    return found


def counted(admin: FakeAdmin) -> dict[str, int]:
    names = [name for name, _, _ in admin.calls]
    admin.calls.clear()
    return {name: names.count(name) for name in sorted(set(names))}


def test_requests_per_interval_do_not_depend_on_the_number_of_topics(admin: FakeAdmin) -> None:
    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        await watch.update()
        assert counted(admin) == {
            "ask_each": TOPICS_PER_INTERVAL, "cluster": 1, "election_histories": 1, "groups": 1,
            "members": GROUPS_PER_INTERVAL, "progress": GROUPS_PER_INTERVAL,
            "replicas": 1, "topics": 1,
        }  # fmt: skip
        await watch.update()
        assert counted(admin) == {
            "ask_each": TOPICS_PER_INTERVAL, "cluster": 1, "election_histories": 1,
            "members": GROUPS_PER_INTERVAL, "progress": GROUPS_PER_INTERVAL, "replicas": 1,
        }  # fmt: skip

    asyncio.run(main())


def test_topics_are_measured_in_turn_and_the_rest_is_unknown(admin: FakeAdmin) -> None:
    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        for expected in (200, 400, 500):
            admin.now_ms += 5_000
            await watch.update()
            assert len(watch.snapshot.topic_figures) == expected
        assert watch.snapshot.topic_figures["t000"].messages == 20

    asyncio.run(main())


def test_a_rate_needs_two_measurements(admin: FakeAdmin) -> None:
    admin.answers["topics"] = [topic("orders")]

    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        await watch.update()
        assert watch.snapshot.topic_figures["orders"].rate_in is None
        admin.now_ms += 10_000
        admin.answers["ask_each"] = stats(80)
        await watch.update()
        assert watch.snapshot.topic_figures["orders"].rate_in == 5.0
        admin.now_ms += 10_000
        admin.answers["ask_each"] = stats(11)  # deleted and created again
        await watch.update()
        assert watch.snapshot.topic_figures["orders"].rate_in is None

    asyncio.run(main())


def test_nobody_looks_only_some_groups_are_measured_once_a_minute(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 5.0, 61.0, 122.0, 200.0, 1_000.0])
    now_s = [0.0]
    monkeypatch.setattr(watch_module, "_now_s", lambda: now_s[0])
    admin.answers["progress"] = progress

    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]

        async def update() -> dict[str, int]:
            now_s[0] = next(times)
            admin.now_ms += 5_000
            await watch.update()
            return counted(admin)

        first = await update()
        assert "ask_each" not in first
        assert first["progress"] == IDLE_GROUPS
        assert "progress" not in await update()
        assert (await update())["progress"] == IDLE_GROUPS + IDLE_BEHIND
        assert (await update())["progress"] == IDLE_GROUPS + IDLE_BEHIND
        assert len(watch.snapshot.group_figures) == 120
        samples = watch.history.since(0)
        assert [sample["rate_in"] for sample in samples] == [3.0] * 4
        assert [sample["lag_ms"] for sample in samples] == [49_000, 49_000, 99_000, 119_000]
        assert watch.lag_rounds_s() == (15.0, 180.0)
        admin.answers["cluster"] = PeerUnreachable("connection refused")
        await update()
        await update()
        assert watch.history.since(0)[-1]["lag_ms"] is None  # old values are not repeated

    asyncio.run(main())


def progress(name: str) -> GroupProgress:
    """One message, which is as many seconds old as the group's number."""
    queue = MessageQueue("orders", "broker-a", 0)
    age_ms = 1_000 * int(name.removeprefix("g"))
    at = QueueProgress(queue, 8, 7, None, age_ms, None, None)
    return GroupProgress(name, (at,), 0.0)


def test_a_failure_keeps_the_last_snapshot_and_says_why(admin: FakeAdmin) -> None:
    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        await watch.update()
        admin.answers["cluster"] = PeerUnreachable("connection refused")
        await watch.update()
        assert "connection refused" in watch.snapshot.problem
        assert len(watch.snapshot.topics) == 500
        assert watch.history.since(0)[-1]["rate_in"] is None
        admin.answers["cluster"] = ClusterState(("n:1",), (broker_state(),))
        admin.calls.clear()
        await watch.update()
        assert watch.snapshot.problem == ""
        assert counted(admin)["topics"] == 1

    asyncio.run(main())


def test_elections_are_kept_while_no_controller_answers(admin: FakeAdmin) -> None:
    election = Election("broker-a", 3, 2, 77, "the master sends no heartbeats")
    admin.answers["election_histories"] = (ElectionHistory("broker-a", (election,)),)

    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        await watch.update()
        lost = PeerUnreachable("connection refused")
        admin.answers["election_histories"] = (ElectionHistory("broker-a", problem=lost),)
        await watch.update()
        [history] = watch.snapshot.histories
        assert history.elections == (election,)
        assert history.problem is lost

    asyncio.run(main())


def test_a_group_that_cannot_be_measured_is_unknown(admin: FakeAdmin) -> None:
    admin.answers["progress"] = PeerUnreachable("no answer")

    async def main() -> None:
        watch = ClusterWatch(admin, 5.0)  # type: ignore[arg-type]
        watch.use()
        await watch.update()
        figures = watch.snapshot.group_figures["g000"]
        assert (figures.lag, figures.lag_ms, figures.members) == (None, None, None)
        assert "no answer" in figures.problem
        assert watch.snapshot.lag is None

    asyncio.run(main())


def test_a_first_look_wakes_the_watch(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "IDLE_S", 60.0)

    async def main() -> None:
        watch = ClusterWatch(admin, 3_600.0)  # type: ignore[arg-type]
        await watch.start()
        await watch.updated.wait()
        watch.use()
        while not watch.snapshot.topic_figures:
            await asyncio.sleep(0)
        await watch.close()

    asyncio.run(asyncio.wait_for(main(), 30))
