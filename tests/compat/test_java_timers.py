"""Real Java clients: messages for a time, their recall, and a broker that dies while they wait.

How late messages come is printed (pytest -s), never asserted: Apache delivers by whole seconds.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters, maven
from .clients import mqadmin
from .java_session import JavaSession, eventually
from .variants import at_depth, clients, each_release, each_v5

pytestmark = [pytest.mark.compat, pytest.mark.slow]

# The setters and the recall (@each_v5) came with 5.x; an old client has the properties anyway.
# @each_release is for the ways to set a time, @any_v5 for what only the broker decides.
any_v5 = clients(at_depth("5.4.0-binary", "5.5.1-json"))

CONF: dict[str, Any] = {"recallMessageEnable": True}
# Without it Apache recalls what has the same id in any topic.
EXACT = {**CONF, "appendTopicForTimerDeleteKey": True}
DAY_S = 24 * 3600
TOO_FAR_S = 41 * DAY_S
ILLEGAL, FORBIDDEN = 13, 604

# Places of what a push consumer tells of each message.
BODY, STORED_MS = 3, 11

Message = dict[str, Any]


@pytest.fixture(scope="module")
def timers(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster in which messages can be recalled: with Apache that is a setting."""
    with clusters.running(
        tmp_path_factory.mktemp("timers"), brokerName="clock", **EXACT
    ) as cluster:
        yield cluster


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send(client: JavaSession, cluster: clusters.Cluster, messages: list[Message]) -> list[Message]:
    """What each was answered; refusals too."""
    producer = f"timers-{cluster.broker}"
    client.do("timer.start", producer=producer, namesrv=cluster.namesrv)
    lines: list[Message] = client.do("timer.send", producer=producer, messages=messages)
    return lines


def send_all(
    client: JavaSession, cluster: clusters.Cluster, messages: list[Message]
) -> list[Message]:
    lines = send(client, cluster, messages)
    assert {line.get("status") for line in lines} == {"SEND_OK"}, lines
    return lines


def recall(
    client: JavaSession, cluster: clusters.Cluster, topic: str, handles: list[str]
) -> list[Message]:
    lines: list[Message] = client.do(
        "timer.recall", producer=f"timers-{cluster.broker}", topic=topic, handles=handles
    )
    return lines


def listen(client: JavaSession, cluster: clusters.Cluster, topic: str) -> None:
    """A consumer of the topic, which is there already when it begins."""
    send_all(client, cluster, [{"topic": topic, "body": "first"}])
    subscribed = {"group": topic, "topics": {topic: "*"}}
    client.do(
        "push.start", consumer=topic, namesrv=cluster.namesrv, poll_namesrv_ms=1000, **subscribed
    )
    assert [row[BODY] for row in received(client, topic, 1)] == ["first"]


def received(client: JavaSession, topic: str, count: int, within_ms: int = 30_000) -> list[Any]:
    rows: list[Any] = client.do("push.received", consumer=topic, count=count, within_ms=within_ms)
    return rows


def timer(client: JavaSession, topic: str, body: str, way: str, value: int) -> Message:
    """A message for a time, as a user of that client makes it."""
    if client.version != maven.V4_9:
        return {"topic": topic, "body": body, "set": {way: value}}
    names = {"setDelayTimeMs": "MS", "setDelayTimeSec": "SEC"}
    name = f"TIMER_DELAY_{names[way]}" if way in names else "TIMER_DELIVER_MS"
    return {"topic": topic, "body": body, "properties": {name: str(value)}}


def at(topic: str, body: str, due_ms: int) -> Message:
    return {"topic": topic, "body": body, "set": {"setDeliverTimeMs": due_ms}}


def judge_times(what: str, rows: list[Any], due: dict[str, int]) -> None:
    """None early; says how late they were."""
    late = sorted(row[STORED_MS] - due[row[BODY]] for row in rows if row[BODY] in due)
    print(
        f"\n{what}: {len(late)} timers, late by {late[len(late) // 2]} ms (p50), "
        f"{late[len(late) * 99 // 100]} ms (p99), {late[-1]} ms (most)"
    )
    assert late[0] >= 0, "early"


@each_release
def test_timers_come_at_their_time(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    listen(client, timers, fresh)
    exact_ms = now_ms() + 2345
    whole_ms = (now_ms() // 1000 + 3) * 1000
    lines = send_all(client, timers, [
        timer(client, fresh, "by ms", "setDelayTimeMs", 1500),
        timer(client, fresh, "by s", "setDelayTimeSec", 2),
        timer(client, fresh, "at", "setDeliverTimeMs", exact_ms),
        timer(client, fresh, "at the second", "setDeliverTimeMs", whole_ms),
        timer(client, fresh, "soon", "setDelayTimeMs", 1),
    ])  # fmt: skip
    due = {
        "by ms": lines[0]["began_ms"] + 1500,
        "by s": lines[1]["began_ms"] + 2000,
        "at": exact_ms,
        "at the second": whole_ms,
        "soon": lines[4]["began_ms"] + 1,
    }
    rows = received(client, fresh, 6)
    assert Counter(row[BODY] for row in rows) == Counter(["first", *due])
    judge_times("each way", rows, due)
    client.do("push.stop", consumer=fresh)


@any_v5
def test_what_is_not_in_the_future_comes_at_once(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    listen(client, timers, fresh)
    lines = send_all(client, timers, [
        timer(client, fresh, "past", "setDeliverTimeMs", now_ms() - 10_000),
        timer(client, fresh, "long past", "setDeliverTimeMs", 1),
        timer(client, fresh, "no delay", "setDelayTimeMs", 0),
        timer(client, fresh, "before", "setDelayTimeSec", -7),
    ])  # fmt: skip
    assert {line["recall_handle"] for line in lines} == {None}
    rows = received(client, fresh, 5)
    assert {row[BODY] for row in rows} == {"first", "past", "long past", "no delay", "before"}
    # They were never parked: the answers name the places at which consumers find them.
    places = {(line["queue_id"], line["queue_offset"]) for line in lines}
    assert places <= {(row[1], row[2]) for row in rows}
    client.do("push.stop", consumer=fresh)


@any_v5
def test_hundreds_over_some_seconds(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    listen(client, timers, fresh)
    count, span_ms = rounds(ci=400, proof=2000), rounds(ci=2000, proof=10_000)
    begin_ms = now_ms() + 1500
    due = {f"t{n}": begin_ms + n * span_ms // count for n in range(count)}
    # Not in the order of their times.
    bodies = [f"t{n * 7 % count}" for n in range(count)]
    assert set(bodies) == set(due)
    send_all(client, timers, [
        timer(client, fresh, body, "setDeliverTimeMs", due[body]) for body in bodies
    ])  # fmt: skip
    rows = received(client, fresh, 1 + count)
    assert Counter(row[BODY] for row in rows) == Counter(["first", *due])
    judge_times("hundreds", rows, due)
    client.do("push.stop", consumer=fresh)


@each_release
def test_what_cannot_wait_is_refused(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    topic = {"topic": fresh, "body": "x"}
    refused = send(client, timers, [
        timer(client, fresh, "x", "setDelayTimeSec", TOO_FAR_S),
        timer(client, fresh, "x", "setDelayTimeMs", TOO_FAR_S * 1000),
        timer(client, fresh, "x", "setDeliverTimeMs", now_ms() + TOO_FAR_S * 1000),
        timer(client, fresh, "x", "setDeliverTimeMs", 2**63 - 1),
        {**topic, "properties": {"TIMER_DELIVER_MS": "tomorrow"}},
        {**topic, "properties": {"TIMER_DELAY_SEC": "1.5"}},
        {**topic, "properties": {"TIMER_DELAY_MS": "9" * 19}},
    ])  # fmt: skip
    assert [line.get("code") for line in refused] == [ILLEGAL] * len(refused), refused


@any_v5
def test_a_delay_level_wins(client: JavaSession, timers: clusters.Cluster, fresh: str) -> None:
    listen(client, timers, fresh)
    far_ms = now_ms() + 3600_000
    both = [
        {**timer(client, fresh, "level", "setDeliverTimeMs", far_ms), "delay_level": 1},
        # One that would be refused if it were looked at.
        {**timer(client, fresh, "too far", "setDelayTimeSec", TOO_FAR_S), "delay_level": 1},
    ]
    lines = send_all(client, timers, both)
    assert {line["recall_handle"] for line in lines} == {None}
    rows = received(client, fresh, 3)
    assert {row[BODY] for row in rows} == {"first", "level", "too far"}
    began_ms = lines[0]["began_ms"]
    assert all(row[STORED_MS] >= began_ms + 1000 for row in rows if row[BODY] != "first")
    client.do("push.stop", consumer=fresh)


def stored(client: JavaSession, cluster: clusters.Cluster, topic: str) -> dict[str, Message]:
    """The messages of the topic, by their keys."""
    client.do("pull.start", consumer="look", namesrv=cluster.namesrv, group="timers-look")
    found: dict[str, Message] = {}
    for queue in client.do("pull.queues", consumer="look", topic=topic):
        place = {"topic": topic, "broker": queue["broker"], "queue_id": queue["queue_id"]}
        if queue["max"]:
            told = client.do("pull.messages", consumer="look", **place)
            found |= {one["keys"]: one for one in told["messages"]}
    return found


@each_release
def test_what_consumers_see_of_a_timer(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    listen(client, timers, fresh)
    due_ms = now_ms() + 2234
    ways = {
        "at": timer(client, fresh, "x", "setDeliverTimeMs", due_ms),
        "by ms": timer(client, fresh, "x", "setDelayTimeMs", 1700),
        "by s": timer(client, fresh, "x", "setDelayTimeSec", 2),
        "level": {**timer(client, fresh, "x", "setDelayTimeSec", 1), "delay_level": 1},
        "past": timer(client, fresh, "x", "setDeliverTimeMs", 1000),
    }
    messages = [{**one, "keys": key, "tags": "A"} for key, one in ways.items()]
    lines = dict(zip(ways, send_all(client, timers, messages), strict=True))
    assert len(received(client, fresh, 1 + len(ways))) == 1 + len(ways)
    seen = stored(client, timers, fresh)
    common = {"TAGS", "KEYS", "UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER"}
    parked = {"REAL_TOPIC", "REAL_QID"}
    timed = {"TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"}
    offsets = {"MIN_OFFSET", "MAX_OFFSET"}  # of the queue: made by the client
    names = {key: set(one["properties"]) - offsets for key, one in seen.items() if key}
    assert names == {
        "at": common | parked | timed | {"TIMER_DELIVER_MS"},
        "by ms": common | parked | timed | {"TIMER_DELAY_MS"},
        "by s": common | parked | timed | {"TIMER_DELAY_SEC"},
        "level": common | parked | {"DELAY"},  # the other way is gone
        "past": common | {"TIMER_DELIVER_MS"},
    }
    due = {"at": due_ms, "by ms": lines["by ms"]["began_ms"] + 1700}
    due["by s"] = lines["by s"]["began_ms"] + 2000
    for key, time_ms in due.items():
        one, properties = seen[key], seen[key]["properties"]
        assert properties["UNIQ_KEY"] == lines[key]["msg_id"]
        assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == (fresh, str(one["queue_id"]))
        assert properties["WAIT"] == "true"
        # The slot is a whole second before the time. The time of a delay is the broker's.
        slot_ms = int(properties["TIMER_OUT_MS"])
        sending_ms = lines[key]["ended_ms"] - lines[key]["began_ms"]
        assert slot_ms % 1000 == 0
        assert 0 < time_ms - slot_ms + (key != "at") * sending_ms <= 1000 + sending_ms
        assert int(properties["TIMER_ENQUEUE_MS"]) <= int(properties["TIMER_DEQUEUE_MS"])
        assert time_ms <= int(properties["TIMER_DEQUEUE_MS"]) <= one["store_timestamp"]
    assert seen["at"]["properties"]["TIMER_DELIVER_MS"] == str(due_ms)
    client.do("push.stop", consumer=fresh)


def handle(topic: str, broker: str, due_ms: int | str, msg_id: str, version: str = "v1") -> str:
    """As a broker makes it."""
    text = " ".join((version, topic, broker, str(due_ms), msg_id))
    return base64.urlsafe_b64encode(text.encode()).decode()


@each_v5
def test_what_is_recalled_never_comes(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    listen(client, timers, fresh)
    due_ms = now_ms() + 3000
    bodies = [f"{kind}{n}" for n in range(40) for kind in ("wanted", "unwanted")]
    messages = [at(fresh, body, due_ms) for body in bodies]
    lines = dict(zip(bodies, send_all(client, timers, messages), strict=True))
    lines |= {
        body: send_all(client, timers, [{"topic": fresh, "body": body, "set": {way: value}}])[0]
        for body, way, value in (
            ("unwanted by ms", "setDelayTimeMs", 2500), ("unwanted by s", "setDelayTimeSec", 3)
        )
    }  # fmt: skip
    unwanted = {body: line for body, line in lines.items() if body.startswith("unwanted")}
    recalled = recall(client, timers, fresh, [line["recall_handle"] for line in unwanted.values()])
    assert recalled == [{"msg_id": line["msg_id"]} for line in unwanted.values()]
    # Once more is no error: whether there is something to recall is seen when the time comes.
    again = recall(client, timers, fresh, [lines["unwanted0"]["recall_handle"]])
    assert again == [{"msg_id": lines["unwanted0"]["msg_id"]}]
    # One that comes after all of them, so that no more are to come.
    send_all(client, timers, [at(fresh, "last", due_ms + 1500)])
    wanted = Counter(["first", "last", *(body for body in bodies if body not in unwanted)])
    rows = received(client, fresh, sum(wanted.values()))
    assert Counter(row[BODY] for row in rows) == wanted
    client.do("push.stop", consumer=fresh)


@each_v5
def test_handles_are_as_apache_makes_them(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    due_ms = now_ms() + 60_000
    (line,) = send_all(client, timers, [at(fresh, "x", due_ms)])
    words = base64.urlsafe_b64decode(line["recall_handle"]).decode().split(" ")
    slot_ms = (due_ms - 1) // 1000 * 1000
    assert words == ["v1", fresh, timers.broker, str(slot_ms + 1), line["msg_id"]]


@each_v5
def test_recalls_that_are_refused(
    client: JavaSession, timers: clusters.Cluster, fresh: str
) -> None:
    other = f"{fresh}-other"
    listen(client, timers, fresh)
    send_all(client, timers, [{"topic": other, "body": "here"}])
    (line,) = send_all(client, timers, [at(fresh, "x", now_ms() + 30_000)])
    due_ms, msg_id = now_ms() + 20_000, line["msg_id"]
    refused = {
        "too late": handle(fresh, timers.broker, now_ms() - 1, msg_id),
        "too far": handle(fresh, timers.broker, now_ms() + TOO_FAR_S * 1000, msg_id),
        "no time": handle(fresh, timers.broker, "soon", msg_id),
        "another broker": handle(fresh, "nobody", due_ms, msg_id),
        "another topic": handle(other, timers.broker, due_ms, msg_id),
    }
    lines = recall(client, timers, fresh, list(refused.values()))
    answers = {why: line.get("code") for why, line in zip(refused, lines, strict=True)}
    assert answers == dict.fromkeys(refused, FORBIDDEN), lines
    # These the client itself does not send.
    for bad in ("", "no base 64!", handle(fresh, timers.broker, due_ms, msg_id, "v2")):
        (answer,) = recall(client, timers, fresh, [bad])
        assert answer["error"] == "MQClientException"
    # What is recalled in another topic stays: the key is of topic and id.
    (line,) = send_all(client, timers, [at(fresh, "stays", now_ms() + 2000)])
    slot_ms = base64.urlsafe_b64decode(line["recall_handle"]).decode().split(" ")[3]
    foreign = handle(other, timers.broker, slot_ms, line["msg_id"])
    assert recall(client, timers, other, [foreign]) == [{"msg_id": line["msg_id"]}]
    rows = received(client, fresh, 2)
    assert "stays" in {row[BODY] for row in rows}
    client.do("push.stop", consumer=fresh)


@pytest.mark.usefixtures("java")
@pytest.mark.timeout(300)
def test_timers_outlive_the_death_of_the_broker(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str
) -> None:
    client = start_java()
    with clusters.running(tmp_path, brokerName="mortal", **CONF) as cluster:
        listen(client, cluster, fresh)
        due: dict[str, int] = {}
        possible: dict[str, int] = {}  # for those due while the broker was away: its return
        unwanted: set[str] = set()
        for life in range(rounds(ci=1, proof=5)):
            begin_ms = now_ms()
            # Due before the kill, while the broker is down, and after it has come back.
            times = {f"{life}-{n}": begin_ms + 1000 + n * 40 for n in range(200)}
            lines = send_all(client, cluster, [at(fresh, body, ms) for body, ms in times.items()])
            due |= times
            gone = [n for n, ms in enumerate(times.values()) if ms > begin_ms + 2600][::3]
            recalled = recall(client, cluster, fresh, [lines[n]["recall_handle"] for n in gone])
            assert recalled == [{"msg_id": lines[n]["msg_id"]} for n in gone]
            unwanted |= {f"{life}-{n}" for n in gone}
            time.sleep(max(0.0, begin_ms + 2500 - now_ms()) / 1000)
            kill_ms = now_ms()
            cluster.server.kill()
            time.sleep(1)
            cluster.server.start()
            possible |= {body: max(ms, now_ms()) for body, ms in times.items() if ms > kill_ms}
            eventually(
                lambda: send(client, cluster, [{"topic": fresh, "body": "?"}])[0].get("status")
            )
            time.sleep(max(0.0, begin_ms + 9000 - now_ms()) / 1000)
        wanted = due.keys() - unwanted

        def all_came() -> bool:
            return wanted <= {row[BODY] for row in received(client, fresh, 0)}

        assert eventually(all_came, within_s=60), "lost"
        rows = received(client, fresh, 0)
        judge_times("killed", rows, due)
        times_came = Counter(row[BODY] for row in rows if row[BODY] in due)
        print(f"{sum(times_came.values()) - len(times_came)} of {len(due)} came once more")
        late = [row[STORED_MS] - possible[row[BODY]] for row in rows if row[BODY] in possible]
        print(f"at most {max(late)} ms late, reckoned from the broker's return")
        assert not unwanted & times_came.keys(), "recalled ones came"
        client.do("push.stop", consumer=fresh)


def test_mqadmin_shows_the_timers(timers: clusters.Cluster, java54: JavaSession) -> None:
    said = mqadmin(java54, timers.namesrv, "brokerStatus", "-b", timers.broker_address)
    pairs = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    figures = {name.strip(): value.strip() for name, value in pairs.items()}
    wanted = ("timerReadBehind", "timerOffsetBehind", "timerCongestNum", "timerEnqueueTps",
              "timerDequeueTps")  # fmt: skip
    assert all(float(figures[name]) >= 0 for name in wanted)
    assert figures["timerOffsetBehind"] == "0"
