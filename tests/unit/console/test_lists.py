"""Lists of topics, groups and dead letters; resets; jobs; saved searches."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.client.admin.async_admin import (
    GroupMembers,
    QueueMove,
    ResetPlan,
    ResetResult,
    TopicInfo,
    TopicKind,
)
from penstock.console.jobs import Jobs
from penstock.errors import NoPermission, NoRoute, PeerTimeout
from penstock.wire.bodies.client_bodies import MessageQueue
from tests.unit.console.console_kit import (
    SETTINGS,
    TestedConsole,
    group,
    group_figures,
    snapshot,
    topic,
    topic_figures,
)

QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[TestedConsole]:
    with TestedConsole(tmp_path) as found:
        yield found


def test_topics_are_paged_and_sorted_with_the_unknown_ones_last(console: TestedConsole) -> None:
    names = [f"t{number}" for number in range(5)]
    console.show(
        snapshot(
            topics={name: topic(name) for name in names},
            topic_figures={"t1": topic_figures(10), "t3": topic_figures(30)},
        )
    )
    for flag, expected in (("", ["t1", "t3", "t0"]), ("&descending=1", ["t3", "t1", "t0"])):
        found = console.get(f"/topics?sort=messages&size=3{flag}").json()
        assert [row["name"] for row in found["rows"]] == expected
        assert (found["matched"], found["measured"]) == (5, 2)
    assert found["rows"][2]["messages"] is None
    assert [r["name"] for r in console.get("/topics?page=1&size=3").json()["rows"]] == ["t3", "t4"]
    assert console.get("/topics?sort=nothing").status_code == 400
    assert console.get("/topics?page=x").status_code == 400


def test_kinds_of_topics_are_counted(console: TestedConsole) -> None:
    kinds = {"a": TopicKind.NORMAL, "%RETRY%g": TopicKind.RETRY, "%DLQ%g": TopicKind.DLQ}
    console.show(snapshot(topics={name: topic(name, kind) for name, kind in kinds.items()}))
    found = console.get("/topics?kind=dlq").json()
    assert [row["name"] for row in found["rows"]] == ["%DLQ%g"]
    assert found["kinds"] == {"normal": 1, "retry": 1, "dlq": 1}


def test_a_topic_whose_brokers_differ_says_so(console: TestedConsole) -> None:
    brokers = {"broker-a": SETTINGS, "broker-b": replace(SETTINGS, perm=4, read_queues=2)}
    uneven = TopicInfo("uneven", TopicKind.NORMAL, brokers)
    console.show(snapshot(topics={"even": topic("even"), "uneven": uneven}))
    rows = {row["name"]: row["differs"] for row in console.get("/topics").json()["rows"]}
    assert rows == {"even": [], "uneven": ["read_queues", "perm"]}


def test_the_state_of_a_group(console: TestedConsole) -> None:
    figures = {
        "behind": group_figures(5, 20_000),
        "offline": group_figures(5, 20_000, 0),
        "fresh": group_figures(5, 500),
        "done": group_figures(0, 0, 0),
        "strange": group_figures(None, None),
        "left": group_figures(None, None, 0),
    }
    names = [*figures, "unmeasured"]
    console.show(snapshot(groups={n: group(n) for n in names}, group_figures=figures))
    rows = {row["name"]: row["state"] for row in console.get("/groups").json()["rows"]}
    assert rows == {
        "behind": "behind", "offline": "offline", "fresh": "current", "done": "current",
        "strange": "unknown", "left": "offline", "unmeasured": "unknown",
    }  # fmt: skip
    behind = console.get("/groups?state=behind").json()["rows"]
    assert [row["name"] for row in behind] == ["behind"]


def test_the_overview_of_an_unknown_cluster_has_no_zeros(console: TestedConsole) -> None:
    found = console.get("/overview").json()
    for name in ("rate_in", "rate_out", "lag", "lag_ms", "disk_used", "stored_today"):
        assert found[name] is None


@pytest.mark.parametrize(
    ("error", "status"),
    [(NoRoute("unknown"), 404), (NoPermission("no"), 403), (PeerTimeout("late"), 502)],
)
def test_errors_have_a_status_and_a_hint(
    console: TestedConsole, error: Exception, status: int
) -> None:
    console.admin.answers["describe_topic"] = error
    answer = console.get("/topics/orders")
    assert answer.status_code == status
    assert answer.json()["error"]["hint"]


def test_a_reset_applies_the_preview_and_can_be_undone_once(console: TestedConsole) -> None:
    plan = ResetPlan("billing", "orders", (QueueMove(QUEUE, 7, 3),))
    back = ResetPlan("billing", "orders", (QueueMove(QUEUE, 3, 7),))
    console.admin.answers["groups"] = [group("billing")]
    console.admin.answers["plan_reset"] = plan
    console.admin.answers["apply_reset"] = ResetResult(plan.moves, (), (), back)
    path = "/groups/billing/reset"
    shown = console.send("POST", f"{path}/preview", {"topic": "orders", "to": "first"}).json()
    assert shown["moves"] == [{"broker": "broker-a", "queue": 0, "old": 7, "new": 3, "skipped": -4}]
    assert (
        console.send("POST", "/groups/other/reset/apply", {"token": shown["token"]}).status_code
        == 400
    )
    shown = console.send("POST", f"{path}/preview", {"topic": "orders", "to": "first"}).json()
    applied = console.send("POST", f"{path}/apply", {"token": shown["token"]}).json()
    assert console.admin.calls[-1] == ("apply_reset", (plan,), {})
    again = console.send("POST", f"{path}/apply", {"token": shown["token"]})
    assert again.status_code == 400
    [row] = console.get("/groups/billing/resets").json()["rows"]
    assert (row["topic"], row["undone"], row["user"]) == ("orders", False, "local")
    assert console.send("POST", f"{path}/undo", {"token": applied["undo"]}).status_code == 200
    assert console.admin.calls[-1] == ("apply_reset", (back,), {})
    assert console.send("POST", f"{path}/undo", {"token": applied["undo"]}).status_code == 400


@pytest.mark.parametrize(
    ("name", "to"),
    [("biling", {"to": "first"}), ("billing", {"to": "group", "group": "biling"})],
)
def test_a_reset_of_a_group_that_does_not_exist_is_refused(
    console: TestedConsole, name: str, to: dict[str, str]
) -> None:
    console.admin.answers["groups"] = [group("billing")]
    console.admin.answers["members"] = lambda name: GroupMembers(name, (), (), None, None, None)
    answer = console.send("POST", f"/groups/{name}/reset/preview", {"topic": "orders", **to})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == "there is no group biling (similar groups: billing)"
    assert not [call for call in console.admin.calls if call[0].startswith("plan")]


@pytest.mark.parametrize(
    "body",
    [
        {"topic": "orders", "to": "nowhere"},
        {"topic": "orders", "to": "time", "time": ""},
        {"topic": "orders", "to": "time", "time": "soon"},
        {"topic": "orders", "to": "shift", "shift": True},
        {"topic": "orders", "to": "offsets", "offsets": [{"broker": "b"}]},
        {"to": "first"},
    ],
)
def test_a_reset_that_makes_no_sense_is_refused(
    console: TestedConsole, body: dict[str, object]
) -> None:
    assert console.send("POST", "/groups/g/reset/preview", body).status_code == 400
    assert console.admin.calls == []


def test_a_deletion_needs_the_name_again(console: TestedConsole) -> None:
    assert console.send("DELETE", "/topics/orders", {}).status_code == 400
    assert console.send("DELETE", "/groups/billing", {"confirm": "bill"}).status_code == 400
    assert console.admin.calls == []
    console.admin.answers["delete_topic"] = ["broker-a"]
    assert console.send("DELETE", "/topics/orders", {"confirm": "orders"}).status_code == 200


def test_saved_searches_are_replaced_and_deleted(console: TestedConsole) -> None:
    for query in ("?q=1", "?q=2"):
        rows = console.send("POST", "/saved-searches", {"name": "mine", "query": query}).json()
    assert [row["query"] for row in rows["rows"]] == ["?q=2"]
    left = console.send("DELETE", f"/saved-searches/{rows['rows'][0]['id']}").json()
    assert left == {"rows": []}


def test_a_job_keeps_its_rate_reports_failures_and_can_be_stopped() -> None:
    async def main() -> None:
        jobs = Jobs()
        stopped = asyncio.Event()

        async def work(item: int) -> dict[str, object]:
            if item == 1:
                raise PeerTimeout("late")
            if item == 3:
                stopped.set()
            return {"item": item}

        job = jobs.start("four", [0, 1, 2, 3, 4], work, rate=1_000.0)
        await stopped.wait()
        jobs.cancel(job)
        assert job.task is not None
        await job.task
        assert (job.state, job.done, job.failed) == ("cancelled", 4, 1)
        assert [row["ok"] for row in job.rows] == [True, False, True, True]
        await jobs.close()

    asyncio.run(main())
