"""Apache's Go client against `penstock up`; with PENSTOCK_COMPAT_PEER=apache against Apache's own.

The latter shows that what is expected here is what RocketMQ does.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import clusters
from .clusters import Cluster
from .golang import Fields, GoClients, GoError, decode, encode

pytestmark = pytest.mark.compat

# The client balances its queues every 20 s even if it misses a notification on a busy machine.
WAIT_MS = 45_000
SEND_OK = 0
COMPRESSED = 1


@pytest.fixture(scope="module")
def cluster(
    go_tool: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of its own: the common one asks for Java, which Go does not need."""
    if clusters.APACHE:
        request.getfixturevalue("java")
    with clusters.common(tmp_path_factory.mktemp("go-cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def program(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoClients]:
    with GoClients(cluster.namesrv, tmp_path_factory.mktemp("go")) as running:
        yield running


class Clients:
    """The Go program as one test uses it; ends what the test started."""

    def __init__(self, program: GoClients, cluster: Cluster) -> None:
        self.call = program.call
        self._cluster = cluster
        self._started: list[str] = []
        self._numbers = itertools.count(1)
        self._prefix = f"c{random.randrange(1 << 40):010x}"

    def create(self, topic: str, queues: int) -> None:
        self.call("create", topic=topic, address=self._cluster.broker_address, queues=queues)
        self.await_route(topic)

    def await_route(self, topic: str) -> list[Fields]:
        """The queues of a topic, once the NameServer knows it."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while True:
            try:
                queues: list[Fields] = self.call("queues", topic=topic)
                return queues
            except GoError:
                if time.monotonic() > deadline:
                    raise

    def produce(self, selector: str = "", *, trace: bool = False) -> str:
        return self._start("produce", selector=selector, group="go-producers", trace=trace)

    def consume(self, topic: str, group: str, **options: object) -> str:
        return self._start("consume", topic=topic, group=group, **options)

    def subscribe(self, topic: str, group: str, **options: object) -> str:
        return self._start("subscribe", topic=topic, group=group, **options)

    def send(self, topic: str, *bodies: bytes, how: str = "sync") -> list[Fields]:
        """Send plain messages round-robin; what the broker acknowledged."""
        messages = [{"topic": topic, "body": encode(body)} for body in bodies]
        answer: list[Fields] = self.call("send", name=self.produce(), how=how, messages=messages)
        return answer

    def await_all(self, count: int, *names: str) -> list[list[Fields]]:
        """What each of these consumers has got, once it is `count` messages altogether."""
        got: list[list[Fields]] = self.call("await", names=names, count=count, wait_ms=WAIT_MS)
        return got

    def await_bodies(self, count: int, name: str) -> list[bytes]:
        (got,) = self.await_all(count, name)
        return [decode(message) for message in got]

    def await_each(self, bodies: list[bytes], name: str) -> None:
        """Wait until this consumer has got each of these, whatever else it gets."""
        count = len(bodies)
        while missing := set(bodies).difference(got := self.await_bodies(count, name)):
            assert len(got) >= count, f"never arrived: {missing}"
            count = len(got) + 1

    def stop(self, name: str) -> None:
        self._started.remove(name)
        self.call("stop", name=name)

    def stop_all(self) -> None:
        for name in list(self._started):
            self.stop(name)

    def _start(self, do: str, **arguments: object) -> str:
        name = f"{self._prefix}-{next(self._numbers)}"
        self.call(do, name=name, **arguments)
        self._started.append(name)
        return name


@pytest.fixture
def go(program: GoClients, cluster: Cluster) -> Iterator[Clients]:
    clients = Clients(program, cluster)
    yield clients
    clients.stop_all()


@contextmanager
def elsewhere(cluster: Cluster, directory: Path) -> Iterator[Clients]:
    """The Go client in a process that is gone afterwards, and with it every connection.

    A consumer that is stopped about a second after its start, while its first heartbeat is on the
    way, may stay in its group as long as its process lives, also with Apache's broker.
    """
    with GoClients(cluster.namesrv, directory / "elsewhere") as program:
        clients = Clients(program, cluster)
        yield clients
        clients.stop_all()


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [f"body {number}".encode() for number in range(first, first + count)]


@pytest.mark.parametrize("how", ["sync", "async", "one-way"])
def test_messages_arrive_however_they_are_sent(go: Clients, how: str) -> None:
    topic = f"go-sent-{how}"
    go.create(topic, 4)
    bodies = numbered(20)
    acknowledged = go.send(topic, *bodies, how=how)
    got = go.await_all(20, go.consume(topic, f"{topic}-group"))[0]
    assert sorted(map(decode, got)) == sorted(bodies)
    assert {message["queue"] for message in got} == {0, 1, 2, 3}
    if how == "one-way":
        assert acknowledged is None
        return
    assert {answer["status"] for answer in acknowledged} == {SEND_OK}
    where = ("id", "offset_id", "queue", "queue_offset")
    assert {tuple(answer[part] for part in where) for answer in acknowledged} == {
        tuple(message[part] for part in where) for message in got
    }


def test_a_batch_stays_together_and_in_order(go: Clients) -> None:
    topic = "go-batch"
    go.create(topic, 4)
    bodies = numbered(30)
    messages = [
        {"topic": topic, "body": encode(body), "tags": f"tag-{at}", "keys": [f"key-{at}"]}
        for at, body in enumerate(bodies)
    ]
    (answer,) = go.call("send", name=go.produce(), how="batch", messages=messages)
    assert answer["status"] == SEND_OK
    assert len(answer["offset_id"].split(",")) == 30
    got = go.await_all(30, go.consume(topic, "go-batch-group"))[0]
    got.sort(key=lambda message: int(message["queue_offset"]))
    assert [decode(message) for message in got] == bodies
    assert [message["queue_offset"] for message in got] == list(range(30))
    assert {message["queue"] for message in got} == {answer["queue"]}
    assert [message["properties"]["TAGS"] for message in got] == [f"tag-{at}" for at in range(30)]
    assert [message["offset_id"] for message in got] == answer["offset_id"].split(",")


def test_orderly_consumption_keeps_the_order_of_each_sharding_key(go: Clients) -> None:
    topic = "go-orderly"
    go.create(topic, 4)
    keys = [f"order-{number}" for number in range(12)]
    messages = [
        {"topic": topic, "body": encode(f"{step}".encode()), "sharding": key}
        for step in range(10)
        for key in keys
    ]
    sent = go.call("send", name=go.produce("hash"), how="sync", messages=messages)
    got = go.await_all(120, go.consume(topic, "go-orderly-group", orderly=True))[0]
    steps, queues = defaultdict(list), defaultdict(set)
    offsets = defaultdict(list)
    for message in got:
        key = message["properties"]["SHARDING_KEY"]
        steps[key].append(int(decode(message)))
        queues[key].add(message["queue"])
        offsets[message["queue"]].append(message["queue_offset"])
    assert steps == {key: list(range(10)) for key in keys}
    assert all(len(used) == 1 for used in queues.values())
    assert len({answer["queue"] for answer in sent}) > 1
    assert all(order == list(range(len(order))) for order in offsets.values())


def test_two_consumers_of_a_group_share_the_queues(
    go: Clients, cluster: Cluster, tmp_path: Path
) -> None:
    topic, group = "go-shared", "go-shared-group"
    go.create(topic, 4)
    sent: set[bytes] = set()
    mine: set[bytes] = set()
    theirs: set[bytes] = set()
    with elsewhere(cluster, tmp_path) as other:
        leaver, stayer = other.consume(topic, group), go.consume(topic, group)
        deadline = time.monotonic() + WAIT_MS / 1000
        while not (mine and theirs and mine | theirs == sent):
            assert time.monotonic() < deadline, f"never arrived: {sent - mine - theirs}"
            if mine | theirs == sent:
                more = numbered(8, first=len(sent))
                go.send(topic, *more)
                sent.update(more)
            mine = set(go.await_bodies(0, stayer))
            theirs = set(other.await_bodies(0, leaver))
    more = numbered(8, first=len(sent))
    go.send(topic, *more)
    go.await_each(more, stayer)


def test_a_pull_consumer_reads_from_any_offset(go: Clients, cluster: Cluster) -> None:
    topic = "go-pull"
    go.create(topic, 1)
    bodies = numbered(12)
    go.send(topic, *bodies)
    name = go.subscribe(topic, "go-pull-group", expression="*")
    place = {"name": name, "topic": topic, "broker": cluster.broker, "queue": 0}
    for offset, count in ((0, 5), (5, 5), (10, 5), (11, 1)):
        answer = go.call("pull", offset=offset, count=count, **place)
        assert [decode(message) for message in answer["messages"]] == bodies[offset:][:count]
        assert (answer["min"], answer["max"]) == (0, 12)
        assert answer["next"] == min(offset + count, 12)


def test_polling_goes_on_where_it_was_acknowledged(
    go: Clients, cluster: Cluster, tmp_path: Path
) -> None:
    topic, group = "go-poll", "go-poll-group"
    go.create(topic, 1)
    go.send(topic, *numbered(12))
    with elsewhere(cluster, tmp_path) as other:
        name = other.subscribe(topic, group, expression="*")
        got = other.call("poll", name=name, count=12, wait_ms=WAIT_MS)
        assert [decode(message) for message in got] == numbered(12)
    go.send(topic, *numbered(3, first=12))
    name = go.subscribe(topic, group, expression="*")
    got = go.call("poll", name=name, count=3, wait_ms=WAIT_MS)
    assert [decode(message) for message in got] == numbered(3, first=12)


TAGS = ["red", "green", "", "blue", "red", "green", "red"]
RED_OR_BLUE = [b"0", b"3", b"4", b"6"]


def send_tagged(go: Clients, topic: str) -> None:
    go.create(topic, 1)
    messages = [
        {"topic": topic, "body": encode(f"{at}".encode()), "tags": tag}
        for at, tag in enumerate(TAGS)
    ]
    go.call("send", name=go.produce(), how="sync", messages=messages)


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
def test_a_push_consumer_gets_the_tags_it_wants(go: Clients, typed: bool) -> None:
    topic = f"go-tags-{typed}".lower()
    send_tagged(go, topic)
    name = go.consume(topic, f"{topic}-group", expression="red || blue", typed=typed)
    assert sorted(go.await_bodies(4, name)) == RED_OR_BLUE


def test_the_broker_sends_only_the_tags_that_are_wanted(go: Clients, cluster: Cluster) -> None:
    topic = "go-tags-pulled"
    send_tagged(go, topic)
    name = go.subscribe(topic, "go-tags-pulled-group", expression="red || blue", typed=True)
    place = {"name": name, "topic": topic, "broker": cluster.broker, "queue": 0}
    answer = go.call("pull", offset=0, count=32, **place)
    assert [decode(message) for message in answer["messages"]] == RED_OR_BLUE
    assert answer["served"] == 4  # the client would drop the others as well
    assert answer["next"] == 7


def test_broadcast_gives_everything_to_everyone(go: Clients) -> None:
    topic = "go-broadcast"
    go.create(topic, 4)
    bodies = numbered(10)
    go.send(topic, *bodies)
    names = [go.consume(topic, "go-broadcast-group", broadcast=True) for _ in range(2)]
    later = numbered(10, first=10)
    go.send(topic, *later)
    for got in go.await_all(40, *names):
        assert sorted(map(decode, got)) == sorted(bodies + later)


def test_properties_may_be_of_any_script(go: Clients) -> None:
    topic = "go-properties"
    go.create(topic, 1)
    properties = {"城市": "上海 🚢", "emoji": "👩‍👩‍👧‍👦🏳️‍🌈", "quote": '"\\\n\t', "empty-ish": " "}
    message = {
        "topic": topic,
        "body": encode("你好世界 🌍".encode()),
        "flag": 7,
        "tags": "标签",
        "keys": ["钥匙-1", "🔑"],
        "properties": properties,
    }
    (answer,) = go.call("send", name=go.produce(), how="sync", messages=[message])
    ((got,),) = go.await_all(1, go.consume(topic, "go-properties-group"))
    assert decode(got).decode() == "你好世界 🌍"
    assert got["flag"] == 7
    assert got["id"] == answer["id"]
    expected = {**properties, "TAGS": "标签", "KEYS": "钥匙-1 🔑"}
    assert {name: got["properties"].get(name) for name in expected} == expected


def test_bodies_compressed_and_large_arrive_as_sent(go: Clients) -> None:
    topic = "go-bodies"
    go.create(topic, 1)
    text = "一二三四五 ".encode() * 20_000
    noise = random.Random(1).randbytes(3 << 20)
    go.send(topic, text, noise, b"x")
    got = go.await_all(3, go.consume(topic, "go-bodies-group"))[0]
    by_offset = {message["queue_offset"]: message for message in got}
    assert [decode(by_offset[at]) for at in range(3)] == [text, noise, b"x"]
    assert by_offset[0]["sys_flag"] & COMPRESSED
    assert by_offset[0]["store_size"] < len(text) / 10
    assert not by_offset[2]["sys_flag"] & COMPRESSED


def test_a_send_creates_its_topic(go: Clients, cluster: Cluster) -> None:
    topic = "go-created-by-send"
    assert topic not in go.call("topics")
    go.send(topic, b"first")
    queues = go.await_route(topic)
    assert go.await_bodies(1, go.consume(topic, "go-created-group")) == [b"first"]
    assert topic in go.call("topics")
    assert [(queue["brokerName"], queue["queueId"]) for queue in queues] == [
        (cluster.broker, number) for number in range(4)
    ]


@pytest.mark.parametrize("by", ["admin", "send"])
def test_a_created_topic_has_its_route_as_soon_as_that_is_answered(
    go: Clients, cluster: Cluster, by: str
) -> None:
    """A consumer that starts right after may rely on it: the Go client's fails otherwise."""
    producer = go.produce()
    for number in range(60):
        topic = f"go-at-once-{by}-{number}"
        if by == "admin":
            go.call("create", topic=topic, address=cluster.broker_address, queues=1)
        else:
            messages = [{"topic": topic, "body": encode(b"x")}]
            go.call("send", name=producer, how="sync", messages=messages)
        assert go.call("queues", topic=topic)


def test_admin_creates_lists_and_deletes_topics(go: Clients, cluster: Cluster) -> None:
    topic = "go-administered"
    go.create(topic, 3)
    assert topic in go.call("topics")
    assert len(go.call("queues", topic=topic)) == 3
    go.send(topic, b"x")
    assert go.await_bodies(1, go.consume(topic, "go-administered-group")) == [b"x"]
    assert go.call("groups", address=cluster.broker_address)["go-administered-group"] is True
    go.stop_all()
    go.call("delete", topic=topic)
    assert topic not in go.call("topics")
    with pytest.raises(GoError, match="route info not found"):
        go.consume(topic, "go-administered-group")


def test_offsets_outlive_the_consumer(go: Clients, cluster: Cluster, tmp_path: Path) -> None:
    topic, group = "go-restarted", "go-restarted-group"
    go.create(topic, 1)
    go.send(topic, *numbered(20))
    with elsewhere(cluster, tmp_path) as other:
        name = other.consume(topic, group)
        assert sorted(other.await_bodies(20, name)) == sorted(numbered(20))
        other.call("settle", name=name, topic=topic)
    go.send(topic, *numbered(20, first=20))
    again = go.consume(topic, group)
    assert sorted(go.await_bodies(20, again)) == sorted(numbered(20, first=20))


def test_a_new_group_that_starts_from_last_still_gets_a_young_topic(go: Clients) -> None:
    """The broker's rule: as long as a topic's beginning is recent, a new group misses nothing."""
    topic = "go-from-last"
    go.create(topic, 1)
    go.send(topic, *numbered(5))
    name = go.consume(topic, "go-from-last-group", **{"from": "last"})
    assert sorted(go.await_bodies(5, name)) == numbered(5)


def test_a_producer_writes_traces(go: Clients) -> None:
    topic = "go-traced"
    go.create(topic, 1)
    messages = [{"topic": topic, "body": encode(b"x")}]
    (sent,) = go.call("send", name=go.produce(trace=True), how="sync", messages=messages)
    reader = go.consume("RMQ_SYS_TRACE_TOPIC", "go-trace-readers", **{"from": "first"})
    (trace,) = go.await_bodies(1, reader)
    assert trace.startswith(b"Pub\x01")
    assert sent["id"].encode() in trace
