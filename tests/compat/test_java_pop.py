"""Real Java clients of 5.x pop: by a push consumer that the broker shares queues for, and request
by request as the proxy does."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters
from .clients import mqadmin
from .java_session import JavaSession, eventually
from .variants import V5, VARIANTS, at_depth, clients

pytestmark = [pytest.mark.compat, pytest.mark.slow]

# Apache does not understand POP in binary headers: they have 16 bits for the code of a request.
ABLE = [name for name in V5 if not (clusters.APACHE and VARIANTS[name].binary)]
BOTH = [name for name in at_depth("5.4.0-binary", "5.5.1-json", among=V5) if name in ABLE]
both_releases = clients(BOTH)
one_client = clients(at_depth("5.4.0-json", among=ABLE))

# Places of what a push consumer tells of each message.
BODY, TOPIC, TIMES = 3, 9, 10
EARLY_MS = 50
"""Two clocks of one machine."""


@dataclass
class Popper:
    """A client that pops one topic as one group."""

    java: JavaSession
    cluster: clusters.Cluster
    topic: str
    group: str

    def __post_init__(self) -> None:
        self._do("pop.start", namesrv=self.cluster.namesrv)

    def pop(self, **options: Any) -> list[dict[str, Any]]:
        """The messages of one pop."""
        answer = self._do("pop.messages", **options)
        assert bool(answer["messages"]) == (answer["status"] == "FOUND"), answer
        return list(answer["messages"])

    def gather(self, count: int, *, within_s: float = 30.0, **options: Any) -> list[dict[str, Any]]:
        """So many messages, of as many pops as it takes."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < deadline:
            found += self.pop(poll_ms=1000, **options)
        return found

    def ack(self, message: dict[str, Any]) -> str:
        return str(self._do("pop.ack", receipt=message["receipt"])["status"])

    def ack_all(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            assert self.ack(message) == "OK"

    def ack_several(self, messages: list[dict[str, Any]]) -> str:
        receipts = [message["receipt"] for message in messages]
        return str(self._do("pop.ack_several", receipts=receipts)["status"])

    def change(self, message: dict[str, Any], invisible_ms: int) -> dict[str, Any]:
        answer = self._do("pop.change", receipt=message["receipt"], invisible_ms=invisible_ms)
        assert answer["status"] == "OK", answer
        return {**message, "receipt": answer["receipt"]}

    def notified(self, **options: Any) -> bool:
        return bool(self._do("pop.notify", **options))

    def _do(self, command: str, **options: Any) -> Any:
        return self.java.do(
            command, client=f"pop-{self.cluster.broker}", broker=self.cluster.broker,
            address=self.cluster.broker_address, topic=self.topic, group=self.group, **options,
        )  # fmt: skip


@pytest.fixture(scope="module")
def popping(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster for these tests."""
    with clusters.running(tmp_path_factory.mktemp("popping"), brokerName="popping") as cluster:
        yield cluster


def make_topic(client: JavaSession, cluster: clusters.Cluster, topic: str, queues: int = 4) -> None:
    config = {"topicName": topic, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
    admin(client, cluster, "createAndUpdateTopicConfig", cluster.broker_address, config)


def let_pop(client: JavaSession, cluster: clusters.Cluster, topic: str) -> None:
    """Tell the group named like the topic to pop it."""
    told = (cluster.broker_address, topic, topic, "POP", 0, 5000)
    admin(client, cluster, "setMessageRequestMode", *told)


def admin(client: JavaSession, cluster: clusters.Cluster, method: str, *arguments: Any) -> Any:
    name = f"admin-{cluster.broker}"
    try:
        return client.do("admin.call", admin=name, method=method, args=list(arguments))
    except Exception as error:
        if "NullPointer" not in str(error):  # there is no such client yet
            raise
    client.do("admin.start", admin=name, namesrv=cluster.namesrv)
    return client.do("admin.call", admin=name, method=method, args=list(arguments))


def send(
    client: JavaSession, cluster: clusters.Cluster, *messages: dict[str, Any], **how: Any
) -> None:
    producer = f"p-{cluster.broker}"
    client.do("producer.start", producer=producer, namesrv=cluster.namesrv)
    acked = client.do("producer.send", producer=producer, messages=list(messages), **how)
    if "later_ms" not in how:
        assert {line.get("status") for line in acked} == {"SEND_OK"}, acked


def send_numbers(
    client: JavaSession,
    cluster: clusters.Cluster,
    topic: str,
    count: int,
    first: int = 0,
    **how: Any,
) -> None:
    messages = [{"topic": topic, "body": str(first + number)} for number in range(count)]
    send(client, cluster, *messages, **how)


def send_to_queue(
    client: JavaSession, cluster: clusters.Cluster, topic: str, count: int, **how: Any
) -> None:
    """Numbered messages to queue 0, in order."""
    send_numbers(
        client, cluster, topic, count, how="queue", broker=cluster.broker, queue_id=0, **how
    )


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["body"] for message in messages]


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(first + number) for number in range(count)]


# --- push consumers ------------------------------------------------------------------------------


def start_consumers(
    client: JavaSession, cluster: clusters.Cluster, topic: str, *names: str, **how: Any
) -> None:
    """Let consumers of the group named like the topic start, and wait until they pop."""
    for name in names:
        client.do(
            "push.start", consumer=name, namesrv=cluster.namesrv, group=topic, topics={topic: "*"},
            client_rebalance=False, **how,
        )  # fmt: skip
    for name in names:
        held = eventually(
            lambda name=name: client.do("push.queues", consumer=name, topic=topic, popped=True)  # type: ignore[misc]
        )
        assert held == [[cluster.broker, -1]]
        assert client.do("push.queues", consumer=name, topic=topic) == []


@both_releases
def test_consumers_share_what_they_pop(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh)
    let_pop(client, popping, fresh)
    start_consumers(client, popping, fresh, f"{fresh}-a", f"{fresh}-b")
    sent = 0

    def rows() -> list[list[Any]]:
        return [
            client.do("push.received", consumer=f"{fresh}-{name}", count=0) for name in ("a", "b")
        ]

    while sent < 20 or (sent < 3000 and not all(rows())):
        send_numbers(client, popping, fresh, 10, first=sent)
        sent += 10
    eventually(lambda: sum(map(len, rows())) >= sent)
    first, second = rows()
    assert sorted(row[BODY] for row in first + second) == sorted(numbers(sent))
    assert first, "both work"
    assert second, "both work"
    assert {(row[TOPIC], row[TIMES]) for row in first + second} == {(fresh, 0)}
    for name in ("a", "b"):
        client.do("push.stop", consumer=f"{fresh}-{name}")


@one_client
def test_mqadmin_sets_the_mode(client: JavaSession, popping: clusters.Cluster, fresh: str) -> None:
    make_topic(client, popping, fresh)
    printed = mqadmin(
        client, popping.namesrv, "setConsumeMode", "-b", popping.broker_address, "-t", fresh,
        "-g", fresh, "-m", "POP", "-q", "2",
    )  # fmt: skip
    assert f"set consume mode to {popping.broker_address} success." in printed
    start_consumers(client, popping, fresh, fresh)
    send_numbers(client, popping, fresh, 5)
    got = client.do("push.received", consumer=fresh, count=5)
    assert sorted(row[BODY] for row in got) == numbers(5)
    client.do("push.stop", consumer=fresh)


@one_client
def test_a_failing_listener_gets_popped_messages_again(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh)
    let_pop(client, popping, fresh)
    start_consumers(client, popping, fresh, fresh, fail_times=2)
    send_numbers(client, popping, fresh, 4)
    rows = client.do("push.received", consumer=fresh, count=12, within_ms=60_000)
    times = defaultdict(list)
    for row in rows:
        times[row[BODY]].append(row[TIMES])
        assert row[TOPIC] == fresh, "the client shows the topic it was sent to"
    assert times == {body: [0, 1, 2] for body in numbers(4)}
    client.do("push.stop", consumer=fresh)
    popper = Popper(client, popping, fresh, fresh)
    assert popper.pop(poll_ms=2000) == [], "all is acknowledged"


@one_client
def test_a_popping_consumer_gives_up_after_its_times(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh)
    let_pop(client, popping, fresh)
    start_consumers(client, popping, fresh, fresh, fail_times=99, max_reconsume_times=1)
    send_numbers(client, popping, fresh, 1)
    # It acknowledges what failed too often once it is older than twice the longest delay: 2 s.
    rows = client.do("push.received", consumer=fresh, count=2, within_ms=60_000)
    assert [row[TIMES] for row in rows] == [0, 1]
    time.sleep(4 if clusters.APACHE else 3)
    rows = client.do("push.received", consumer=fresh, count=0)
    assert [row[TIMES] for row in rows] == list(range(len(rows)))
    assert len(rows) <= 4
    client.do("push.stop", consumer=fresh)
    assert Popper(client, popping, fresh, fresh).pop(poll_ms=1500) == []


# --- request by request --------------------------------------------------------------------------


@both_releases
def test_what_is_not_acknowledged_comes_back(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh)
    send_numbers(client, popping, fresh, 10)
    popper = Popper(client, popping, fresh, fresh)
    began_ms = time.time() * 1000
    lent = popper.gather(10, invisible_ms=4_000)
    assert sorted(bodies(lent)) == numbers(10)
    assert {message["times"] for message in lent} == {0}
    assert popper.pop() == [], "what is lent is not seen"
    by_body = {message["body"]: message for message in lent}
    assert popper.ack(by_body["0"]) == "OK"
    for queue_id in range(4):  # the client wants receipts of one pop of one queue
        several = [m for m in lent if m["queue_id"] == queue_id and int(m["body"]) in range(1, 6)]
        if several:
            assert popper.ack_several(several) == "OK"
    longer = popper.change(by_body["6"], 7_000)
    sooner = popper.change(by_body["7"], 1_000)
    assert len({longer["receipt"], sooner["receipt"], by_body["6"]["receipt"]}) == 3

    again = popper.gather(4, invisible_ms=60_000, within_s=40)
    assert sorted(bodies(again)) == ["6", "7", "8", "9"], "only what was not acknowledged"
    seen = {message["body"]: message for message in again}
    for message in again:
        assert message["topic"] == fresh
        assert message["times"] == 1
        assert message["first_pop"] is not None
    assert seen["7"]["seen_ms"] < seen["6"]["seen_ms"]
    for body, invisible_ms in (("7", 1_000), ("8", 4_000), ("9", 4_000), ("6", 7_000)):
        assert seen[body]["seen_ms"] >= began_ms + invisible_ms - EARLY_MS, body
    popper.ack_all(again)
    assert popper.pop(poll_ms=2_000) == []


@one_client
def test_receipts_of_other_times_and_nonsense_are_refused(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh, 1)
    send_numbers(client, popping, fresh, 1)
    popper = Popper(client, popping, fresh, fresh)
    (message,) = popper.gather(1, invisible_ms=60_000)
    words = message["receipt"].split(" ")
    beyond = {**message, "receipt": " ".join([*words[:7], "99"])}
    assert popper.ack(beyond) == "NO_EXIST"
    popper.ack_all([message])


@one_client
def test_waiting_requests_wake_up(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh)
    popper = Popper(client, popping, fresh, fresh)
    assert not popper.notified(poll_ms=500)
    began = time.monotonic()
    assert popper.pop(poll_ms=500) == []
    assert time.monotonic() - began >= 0.4
    send_numbers(client, popping, fresh, 1, later_ms=700)
    began = time.monotonic()
    assert popper.notified(poll_ms=20_000)
    assert time.monotonic() - began < 15
    assert popper.notified(poll_ms=20_000), "there is one, and nothing is taken"
    assert bodies(popper.pop(invisible_ms=60_000)) == ["0"]
    send_numbers(client, popping, fresh, 1, first=1, later_ms=700)
    began = time.monotonic()
    assert bodies(popper.pop(poll_ms=20_000, invisible_ms=60_000)) == ["1"]
    assert time.monotonic() - began < 15


@both_releases
def test_a_fifo_group_waits_for_what_is_open(
    client: JavaSession, popping: clusters.Cluster, fresh: str
) -> None:
    make_topic(client, popping, fresh, 1)
    send_to_queue(client, popping, fresh, 6)
    popper = Popper(client, popping, fresh, fresh)
    lent = {"queue_id": 0, "order": True, "invisible_ms": 30_000}
    pair = popper.pop(count=2, attempt_id="first", **lent)
    assert bodies(pair) == ["0", "1"]
    assert popper.pop(count=2, attempt_id="other", **lent) == [], "blocked"
    pair = popper.pop(count=2, attempt_id="first", **lent)
    assert bodies(pair) == ["0", "1"], "the answer may have been lost"
    popper.ack_all(pair[1:])
    assert popper.pop(count=2, **lent) == [], "still blocked"
    client.do("pop.ack", later_ms=700, receipt=pair[0]["receipt"], topic=fresh, group=fresh,
              client=f"pop-{popping.broker}", address=popping.broker_address)  # fmt: skip
    began = time.monotonic()
    pair = popper.pop(count=2, poll_ms=20_000, **lent)
    assert bodies(pair) == ["2", "3"]
    assert time.monotonic() - began < 15, "the acknowledgement wakes who waits"
    popper.ack_all(pair[:1])
    popper.change(pair[1], 1_500)
    began = time.monotonic()
    again = popper.pop(count=2, poll_ms=20_000, **lent)
    assert bodies(again) == ["3", "4"]
    assert 1.0 <= time.monotonic() - began < 15, "so does the end of the invisible time"
    assert [message["times"] for message in again] == [1, 0]
    popper.ack_all(again)
    popper.ack_all(popper.pop(**lent))
    assert popper.pop(**lent) == []


@one_client
@pytest.mark.parametrize(
    ("exp_type", "exp", "expected"),
    [("TAG", "a || b", ["0", "1"]), ("SQL92", "size > 5 AND TAGS <> 'a'", ["1", "2"])],
    ids=["tags", "sql92"],
)
def test_pops_are_filtered(
    client: JavaSession,
    popping: clusters.Cluster,
    fresh: str,
    exp_type: str,
    exp: str,
    expected: list[str],
) -> None:
    make_topic(client, popping, fresh, 1)
    kinds = [("a", 9), ("b", 9), ("c", 9), ("c", 1)]
    send(
        client, popping,
        *({"topic": fresh, "body": str(n), "tags": tag, "properties": {"size": str(size)}}
          for n, (tag, size) in enumerate(kinds)),
    )  # fmt: skip
    popper = Popper(client, popping, fresh, fresh)
    found = popper.gather(2, exp_type=exp_type, exp=exp, invisible_ms=3_000)
    assert bodies(found) == expected
    assert popper.pop(exp_type=exp_type, exp=exp) == []
    popper.ack_all(found[:1])
    again = popper.gather(1, exp_type=exp_type, exp=exp, within_s=40)
    assert bodies(again) == expected[1:], "retries are filtered too"
    popper.ack_all(again)


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("java")
@pytest.mark.timeout(300)
def test_what_was_lent_when_the_broker_died_comes_back(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str
) -> None:
    client = start_java()
    chosen = random.Random(5)
    with clusters.running(tmp_path, brokerName="mortal") as cluster:
        make_topic(client, cluster, fresh)
        popper = Popper(client, cluster, fresh, fresh)
        for turn in range(rounds(ci=1, proof=5)):
            sent = numbers(40, first=100 * turn)
            send_numbers(client, cluster, fresh, 40, first=100 * turn)
            lent = popper.gather(40, invisible_ms=20_000 if clusters.APACHE else 6_000)
            assert sorted(bodies(lent)) == sorted(sent)
            acked = chosen.sample(lent, 20)
            popper.ack_all(acked)
            if clusters.APACHE:
                time.sleep(6)  # it notes every 5 s how far it has popped, and begins anew there
            cluster.server.kill()
            cluster.server.start()
            eventually(lambda: alive(popper))
            open_bodies = set(sent) - set(bodies(acked))
            again = popper.gather(20, invisible_ms=60_000, within_s=60)
            assert sorted(bodies(again)) == sorted(open_bodies)
            assert {message["times"] for message in again} == {1}
            popper.ack_all(again)
            assert popper.pop(poll_ms=2_000) == [], "nothing acknowledged comes again"


def alive(popper: Popper) -> bool:
    """Whether the broker answers again."""
    try:
        popper.notified(poll_ms=0)
    except Exception:
        return False
    return True
