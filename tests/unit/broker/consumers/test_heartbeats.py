"""Heartbeats and the other requests about who is there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.consumers.heartbeats import HeartbeatHandlers
from penstock.broker.filter.filters import Filters
from penstock.rpc.answers import RegisterSoon
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    CheckClientRequestBody,
    ConsumerData,
    HeartbeatData,
    ProducerData,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from tests.unit.broker.consumers.membership_kit import (
    NOW_MS,
    Bench,
    change,
    consumer,
    make_bench,
    told,
)

HEARTBEAT, UNREGISTER, LIST, CHECK = 34, 35, 38, 46

# As the Java client 5.4.0 sends it.
JAVA_BODY = (
    b'{"clientID":"10.0.0.5@1234#5678","consumerDataSet":[{"consumeFromWhere":'
    b'"CONSUME_FROM_FIRST_OFFSET","consumeType":"CONSUME_PASSIVELY","groupName":"g",'
    b'"messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":false,"codeSet":[2592],'
    b'"expressionType":"TAG","subString":"QQ","subVersion":1700000000000,"tagsSet":["QQ"],'
    b'"topic":"T"},{"classFilterMode":false,"codeSet":[],"expressionType":"TAG","subString":"*",'
    b'"subVersion":1700000000001,"tagsSet":[],"topic":"%RETRY%g"}],"unitMode":false}],'
    b'"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"CLIENT_INNER_PRODUCER"}],'
    b'"withoutSub":false}'
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(tmp_path)
    bench.serve(HeartbeatHandlers(bench.live, bench.clients, bench.groups, bench.topics, Filters()))
    yield bench
    bench.store.close()


def beat(
    client_id: str, *consumers: ConsumerData, producers: tuple[str, ...] = (),
    without_sub: bool = False, fingerprint: int = 0,
) -> bytes:  # fmt: skip
    return fastjson.encode(
        HeartbeatData(
            client_id=client_id, consumer_data_set=list(consumers),
            producer_data_set=[ProducerData(group_name=p) for p in producers],
            without_sub=without_sub, heartbeat_fingerprint=fingerprint,
        )
    )  # fmt: skip


def test_heartbeat_of_a_java_client(bench: Bench) -> None:
    reply = bench.ask(HEARTBEAT, JAVA_BODY)
    assert (reply.code, reply.remark, reply.body) == (0, None, b"")
    group = bench.clients.consumer_group("g")
    assert group is not None
    (member,) = group.members.values()
    assert (member.client, member.client_id, member.address, member.version) == (
        1, "10.0.0.5@1234#5678", "10.0.0.1:99", 479,
    )  # fmt: skip
    assert (group.consume_from_where, set(group.subscriptions)) == (
        "CONSUME_FROM_FIRST_OFFSET",
        {"T", "%RETRY%g"},
    )
    assert group.subscriptions["T"].code_set == {2592}
    assert [m.client for m in bench.clients.producers("CLIENT_INNER_PRODUCER")] == [1]
    assert told(bench.effects) == [(1, "g")]


def test_heartbeat_makes_the_group_and_its_retry_topic(bench: Bench) -> None:
    bench.groups.put(SubscriptionGroupConfig(group_name="many", retry_queue_nums=3), NOW_MS)
    body = beat("c", consumer("new", "T"), consumer("many", "T"), producers=("p", ""))
    bench.ask(HEARTBEAT, body)
    assert bench.groups.get("new") is not None
    for group, queues in (("new", 1), ("many", 3)):
        assert bench.topics.get(f"%RETRY%{group}") == TopicConfig(
            topic_name=f"%RETRY%{group}", read_queue_nums=queues, write_queue_nums=queues, perm=6
        )
    assert RegisterSoon() in bench.effects.take()
    assert set(bench.clients.producer_groups()) == {"p"}


def test_group_that_is_not_made_leaves_the_others_alone(bench: Bench) -> None:
    bench.groups.put(SubscriptionGroupConfig(group_name="known"), NOW_MS)
    change(bench.live, auto_create_groups=False)
    body = beat("c", consumer("unknown", "T"), consumer("known", "T"), producers=("p",))
    assert bench.ask(HEARTBEAT, body).code == 0
    assert bench.clients.consumer_group("unknown") is None
    assert bench.clients.consumer_group("known") is not None
    assert len(bench.clients.producers("p")) == 1
    assert bench.topics.get("%RETRY%unknown") is None


def test_heartbeats_are_to_be_full(bench: Bench) -> None:
    ext = bench.ask(HEARTBEAT, beat("c", consumer("g", "T"), fingerprint=77)).ext
    assert ext is not None
    assert ext["IS_SUPPORT_HEART_BEAT_V2"] == "false"
    short = beat("c", consumer("g"), fingerprint=77, without_sub=True)
    ext = bench.ask(HEARTBEAT, short).ext
    assert ext is not None
    assert ext["IS_SUB_CHANGE"] == "true"
    assert bench.clients.subscription("g", "T") is not None


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'{"clientID":""}', b"[1]", b'{"clientID":[]}'])
def test_heartbeats_that_say_nothing_are_refused(bench: Bench, body: bytes) -> None:
    assert bench.ask(HEARTBEAT, body).code == 29
    assert bench.clients.producer_groups() == {}


def test_unregistering_leaves_the_named_groups(bench: Bench) -> None:
    body = beat("c", consumer("g", "T"), consumer("h", "T"), producers=("p", "q"))
    bench.ask(HEARTBEAT, body)
    assert bench.ask(UNREGISTER, clientID="c", producerGroup="p", consumerGroup="g").code == 0
    assert [g.name for g in bench.clients.consumer_groups()] == ["h"]
    assert set(bench.clients.producer_groups()) == {"q"}
    assert bench.ask(UNREGISTER, clientID="c").code == 0
    assert bench.ask(UNREGISTER, clientID="c", consumerGroup="never").code == 0
    assert bench.groups.get("never") is None
    assert bench.ask(UNREGISTER, consumerGroup="h").code == 29


def test_list_of_consumers_has_the_asking_client(bench: Bench) -> None:
    bench.ask(HEARTBEAT, beat("a@1", consumer("g", "T")), client=1)
    bench.ask(HEARTBEAT, beat("b@2", consumer("g", "T")), client=2)
    reply = bench.ask(LIST, consumerGroup="g")
    assert (reply.code, reply.body) == (0, b'{"consumerIdList":["a@1","b@2"]}')


def test_list_of_consumers_has_a_client_id_once(bench: Bench) -> None:
    for client in (1, 2):
        bench.ask(HEARTBEAT, beat("host@DEFAULT", consumer("g", "T")), client=client)
    bench.ask(HEARTBEAT, beat("b@2", consumer("g", "T")), client=3)
    assert bench.ask(LIST, consumerGroup="g").body == b'{"consumerIdList":["host@DEFAULT","b@2"]}'


@pytest.mark.parametrize(("consumers", "producers"), [(0, 1_001), (1_001, 0), (501, 500)])
def test_client_with_too_many_groups_is_refused(
    bench: Bench, consumers: int, producers: int
) -> None:
    before = len(bench.topics.table.topics)
    reply = bench.ask(
        HEARTBEAT,
        beat(
            "greedy", *(consumer(f"g{n}", "T") for n in range(consumers)),
            producers=tuple(f"p{n}" for n in range(producers)),
        ),
    )  # fmt: skip
    assert reply.code == 29
    assert "1001 groups, the limit is 1000" in (reply.remark or "")
    assert bench.groups.get("g0") is None
    assert len(bench.topics.table.topics) == before
    assert bench.clients.producer_groups() == {}


def test_client_with_too_many_subscriptions_is_refused(bench: Bench) -> None:
    def tagged(count: int) -> bytes:
        tags = frozenset(f"tag{n}" for n in range(count))
        data = SubscriptionData(topic="U", sub_string=" || ".join(tags), tags_set=tags)
        plain = consumer("g", *(f"T{n}" for n in range(5_000)))
        return beat("c", plain, ConsumerData(group_name="h", subscription_data_set=[data]))

    reply = bench.ask(HEARTBEAT, tagged(5_000))
    assert reply.code == 29
    assert "10001 of them, the limit is 10000" in (reply.remark or "")
    assert bench.groups.get("g") is None
    assert bench.ask(HEARTBEAT, tagged(4_999)).code == 0


def test_heartbeat_that_is_too_long_is_not_read(bench: Bench) -> None:
    body = b'{"clientID":"c","consumerDataSet":[]' + b" " * (4 << 20) + b"}"
    assert bench.ask(HEARTBEAT, body).code == 29


def test_list_of_nobody_is_an_error(bench: Bench) -> None:
    reply = bench.ask(LIST, consumerGroup="g")
    assert reply.code == 1
    assert reply.remark is not None
    assert reply.remark.startswith("no consumer for this group, g")
    assert bench.ask(LIST).code == 29


@pytest.mark.parametrize(
    ("kind", "code"), [("TAG", 0), ("", 0), ("SQL92", 0), ("sql92", 23), ("CLASS", 23)]
)
def test_filters_of_known_types_are_understood(bench: Bench, kind: str, code: int) -> None:
    data = SubscriptionData(topic="T", sub_string="a > 1", expression_type=kind)
    body = CheckClientRequestBody(client_id="c", group="g", subscription_data=data)
    reply = bench.ask(CHECK, fastjson.encode(body))
    assert reply.code == code
    if code:
        assert reply.remark is not None
        assert kind in reply.remark


def test_a_bad_filter_is_refused_with_its_place(bench: Bench) -> None:
    data = SubscriptionData(topic="T", sub_string="a > 1 AND b >", expression_type="SQL92")
    body = CheckClientRequestBody(client_id="c", group="g", subscription_data=data)
    reply = bench.ask(CHECK, fastjson.encode(body))
    assert reply.code == 23
    assert "column 14" in (reply.remark or "")


def test_check_without_a_subscription_is_fine(bench: Bench) -> None:
    assert bench.ask(CHECK, b'{"clientId":"c","group":"g"}').code == 0
