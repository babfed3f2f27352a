"""Heartbeats and other requests about connected clients."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.consumers import heartbeats
from penstock.broker.consumers.clients import NEVER_MS
from penstock.broker.consumers.heartbeats import (
    FULL_HEARTBEATS_ONLY,
    GROUPS_PER_STEP,
    HeartbeatHandlers,
)
from penstock.broker.filter.filters import Filters
from penstock.rpc.answers import Answer, NextIteration, RegisterSoon, Reply
from penstock.rpc.command import Command
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
    ConsumerFixture,
    change,
    consumer,
    make_fixture,
    notified,
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
def fixture(tmp_path: Path) -> Iterator[ConsumerFixture]:
    fixture = make_fixture(tmp_path)
    fixture.serve(
        HeartbeatHandlers(fixture.live, fixture.clients, fixture.groups, fixture.topics, Filters())
    )
    yield fixture
    fixture.store.close()


def beat(
    client_id: str,
    *consumers: ConsumerData,
    producers: tuple[str, ...] = (),
    without_sub: bool = False,
    fingerprint: int = 0,
) -> bytes:
    return fastjson.encode(
        HeartbeatData(
            client_id=client_id,
            consumer_data_set=list(consumers),
            producer_data_set=[ProducerData(group_name=p) for p in producers],
            without_sub=without_sub,
            heartbeat_fingerprint=fingerprint,
        )
    )


def test_heartbeat_of_a_java_client(fixture: ConsumerFixture) -> None:
    reply = fixture.ask(HEARTBEAT, JAVA_BODY)
    assert (reply.code, reply.remark, reply.body) == (0, None, b"")
    group = fixture.clients.consumer_group("g")
    assert group is not None
    (member,) = group.members.values()
    assert (member.client, member.client_id, member.address, member.version) == (
        1,
        "10.0.0.5@1234#5678",
        "10.0.0.1:99",
        479,
    )
    assert (group.consume_from_where, set(group.subscriptions)) == (
        "CONSUME_FROM_FIRST_OFFSET",
        {"T", "%RETRY%g"},
    )
    assert group.subscriptions["T"].code_set == {2592}
    assert [m.client for m in fixture.clients.producers("CLIENT_INNER_PRODUCER")] == [1]
    assert notified(fixture.effects) == [(1, "g")]


def test_a_heartbeat_creates_the_group_and_its_retry_topic(fixture: ConsumerFixture) -> None:
    fixture.groups.put(SubscriptionGroupConfig(group_name="many", retry_queue_nums=3), NOW_MS)
    body = beat("c", consumer("new", "T"), consumer("many", "T"), producers=("p", ""))
    fixture.ask(HEARTBEAT, body)
    assert fixture.groups.get("new") is not None
    for group, queues in (("new", 1), ("many", 3)):
        assert fixture.topics.get(f"%RETRY%{group}") == TopicConfig(
            topic_name=f"%RETRY%{group}", read_queue_nums=queues, write_queue_nums=queues, perm=6
        )
    assert RegisterSoon() in fixture.effects.take()
    assert set(fixture.clients.producer_groups()) == {"p"}


def test_a_refused_group_does_not_affect_others(fixture: ConsumerFixture) -> None:
    fixture.groups.put(SubscriptionGroupConfig(group_name="known"), NOW_MS)
    change(fixture.live, auto_create_groups=False)
    body = beat("c", consumer("unknown", "T"), consumer("known", "T"), producers=("p",))
    assert fixture.ask(HEARTBEAT, body).code == 0
    assert fixture.clients.consumer_group("unknown") is None
    assert fixture.clients.consumer_group("known") is not None
    assert len(fixture.clients.producers("p")) == 1
    assert fixture.topics.get("%RETRY%unknown") is None


def test_responses_ask_for_full_heartbeats(fixture: ConsumerFixture) -> None:
    ext = fixture.ask(HEARTBEAT, beat("c", consumer("g", "T"), fingerprint=77)).ext
    assert ext is not None
    assert ext["IS_SUPPORT_HEART_BEAT_V2"] == "false"
    short = beat("c", consumer("g"), fingerprint=77, without_sub=True)
    ext = fixture.ask(HEARTBEAT, short).ext
    assert ext is not None
    assert ext["IS_SUB_CHANGE"] == "true"
    assert fixture.clients.subscription("g", "T") is not None


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'{"clientID":""}', b"[1]", b'{"clientID":[]}'])
def test_empty_heartbeats_are_refused(fixture: ConsumerFixture, body: bytes) -> None:
    assert fixture.ask(HEARTBEAT, body).code == 29
    assert fixture.clients.producer_groups() == {}


def test_unregistering_leaves_the_named_groups(fixture: ConsumerFixture) -> None:
    body = beat("c", consumer("g", "T"), consumer("h", "T"), producers=("p", "q"))
    fixture.ask(HEARTBEAT, body)
    assert fixture.ask(UNREGISTER, clientID="c", producerGroup="p", consumerGroup="g").code == 0
    assert [g.name for g in fixture.clients.consumer_groups()] == ["h"]
    assert set(fixture.clients.producer_groups()) == {"q"}
    assert fixture.ask(UNREGISTER, clientID="c").code == 0
    assert fixture.ask(UNREGISTER, clientID="c", consumerGroup="never").code == 0
    assert fixture.groups.get("never") is None
    assert fixture.ask(UNREGISTER, consumerGroup="h").code == 29


def test_the_list_of_consumers_has_the_requesting_client(fixture: ConsumerFixture) -> None:
    fixture.ask(HEARTBEAT, beat("a@1", consumer("g", "T")), client=1)
    fixture.ask(HEARTBEAT, beat("b@2", consumer("g", "T")), client=2)
    reply = fixture.ask(LIST, consumerGroup="g")
    assert (reply.code, reply.body) == (0, b'{"consumerIdList":["a@1","b@2"]}')


def test_the_list_of_consumers_has_a_client_id_once(fixture: ConsumerFixture) -> None:
    for client in (1, 2):
        fixture.ask(HEARTBEAT, beat("host@DEFAULT", consumer("g", "T")), client=client)
    fixture.ask(HEARTBEAT, beat("b@2", consumer("g", "T")), client=3)
    assert fixture.ask(LIST, consumerGroup="g").body == b'{"consumerIdList":["b@2","host@DEFAULT"]}'


@pytest.mark.parametrize(("consumers", "producers"), [(0, 1_001), (1_001, 0), (501, 500)])
def test_client_with_too_many_groups_is_refused(
    fixture: ConsumerFixture, consumers: int, producers: int
) -> None:
    before = len(fixture.topics.table.topics)
    reply = fixture.ask(
        HEARTBEAT,
        beat(
            "greedy",
            *(consumer(f"g{n}", "T") for n in range(consumers)),
            producers=tuple(f"p{n}" for n in range(producers)),
        ),
    )
    assert reply.code == 29
    assert "1001 groups, the limit is 1000" in (reply.remark or "")
    assert fixture.groups.get("g0") is None
    assert len(fixture.topics.table.topics) == before
    assert fixture.clients.producer_groups() == {}


def test_client_with_too_many_subscriptions_is_refused(fixture: ConsumerFixture) -> None:
    def tagged(count: int) -> bytes:
        tags = frozenset(f"tag{n}" for n in range(count))
        data = SubscriptionData(topic="U", sub_string=" || ".join(tags), tags_set=tags)
        plain = consumer("g", *(f"T{n}" for n in range(5_000)))
        return beat("c", plain, ConsumerData(group_name="h", subscription_data_set=[data]))

    reply = fixture.ask(HEARTBEAT, tagged(5_000))
    assert reply.code == 29
    assert "10001 of them, the limit is 10000" in (reply.remark or "")
    assert fixture.groups.get("g") is None
    assert fixture.ask(HEARTBEAT, tagged(4_999)).code == 0


def test_a_heartbeat_that_is_too_long_is_refused(fixture: ConsumerFixture) -> None:
    body = b'{"clientID":"c","consumerDataSet":[]' + b" " * (4 << 20) + b"}"
    assert fixture.ask(HEARTBEAT, body).code == 29


def consumes(**fields: Any) -> bytes:
    """The heartbeat of a client with this consumer group."""
    return beat("c", ConsumerData(group_name="g", **fields))


def subscribed(**fields: Any) -> bytes:
    """The heartbeat of a client with this subscription."""
    data = SubscriptionData(**{"topic": "T", "sub_string": "*", **fields})
    return consumes(subscription_data_set=[data])


def by_sql(expression: str) -> bytes:
    return subscribed(sub_string=expression, expression_type="SQL92")


@pytest.mark.parametrize(
    ("what", "limit", "make"),
    [
        ("the clientID", 1_024, lambda n: beat("x" * n, producers=("p",))),
        ("the name of a producer group", 255, lambda n: beat("c", producers=("x" * n,))),
        ("the topic of a subscription", 255, lambda n: subscribed(topic="x" * n)),
        ("the subString", 256 * 1024, lambda n: subscribed(sub_string="x" * n)),
        ("the tagsSet", 256 * 1024, lambda n: subscribed(tags_set=frozenset(("a", "x" * (n - 1))))),
        ("the subString", 32_768, lambda n: by_sql("x" * n)),
        ("the expressionType", 64, lambda n: subscribed(expression_type="x" * n)),
        ("the consumeType", 64, lambda n: consumes(consume_type="x" * n)),
        ("the messageModel", 64, lambda n: consumes(message_model="x" * n)),
        ("the consumeFromWhere", 64, lambda n: consumes(consume_from_where="x" * n)),
    ],
)  # fmt: skip
def test_a_heartbeat_with_a_text_that_is_too_long_is_refused(
    fixture: ConsumerFixture, what: str, limit: int, make: Callable[[int], bytes]
) -> None:
    reply = fixture.ask(HEARTBEAT, make(limit + 1))
    assert reply.code == 29
    remark = reply.remark or ""
    assert remark.startswith(what)
    assert f"is too long: {limit + 1} characters, the limit is {limit}" in remark
    assert fixture.clients.producer_groups() == {}
    assert fixture.clients.consumer_group("g") is None
    assert fixture.ask(HEARTBEAT, make(limit)).code == 0


def test_a_group_name_that_is_far_too_long_is_not_logged(
    fixture: ConsumerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    assert fixture.ask(HEARTBEAT, beat("c", consumer("x" * 100_000, "T"))).code == 29
    assert len(caplog.text) < 1_000


@pytest.mark.parametrize(
    "name", ["CID_RMQ_SYS_TRANS", "instance%p", "%RETRY%" + "g" * 120, "com.example/Gruppe ü"]
)
def test_names_of_other_clients_are_accepted(fixture: ConsumerFixture, name: str) -> None:
    assert fixture.ask(HEARTBEAT, beat("c", consumer("g", name), producers=(name,))).code == 0
    assert fixture.clients.subscription("g", name) is not None
    assert len(fixture.clients.producers(name)) == 1


@pytest.mark.slow
def test_heartbeats_of_one_connection_register_a_limited_number_of_bytes(
    fixture: ConsumerFixture,
) -> None:
    """Each heartbeat may name another group, which stays until it expires."""
    tags = frozenset(f"{number:04}" + "x" * 50 for number in range(4_000))
    data = SubscriptionData(topic="T", sub_string="||".join(tags), tags_set=tags)
    replies = [
        fixture.ask(
            HEARTBEAT,
            beat(
                "c",
                ConsumerData(group_name=f"g{n}", subscription_data_set=[data]),
                producers=(f"p{n}",),
            ),
        )
        for n in range(40)
    ]
    refused = replies[-1]
    assert (replies[0].code, refused.code) == (0, 2)
    assert "names and subscriptions of one connection" in (refused.remark or "")
    assert fixture.clients.consumer_group("g39") is None
    assert len(fixture.clients.producers("p39")) == 1, "other groups are registered"
    registered = len(list(fixture.clients.consumer_groups()))
    assert registered * 600_000 < 16 << 20, "a tag of 54 characters takes more than 150 bytes"


def begin_heartbeat(fixture: ConsumerFixture, groups: int = 500) -> NextIteration:
    """The first step of a heartbeat with the consumer groups g0, … and the producer group p."""
    consumers = [consumer(f"g{number}", "T") for number in range(groups)]
    answer = fixture.router.handle(
        Command(HEARTBEAT, {}, beat("c", *consumers, producers=("p",)), client=1, now_ms=NOW_MS)
    )
    assert isinstance(answer, NextIteration)
    return answer


def finish(answer: Answer) -> int:
    """The number of steps until the response."""
    steps = 0
    while isinstance(answer, NextIteration):
        answer = answer.then()
        steps += 1
    assert answer == Reply(ext=FULL_HEARTBEATS_ONLY)
    return steps


def registered(fixture: ConsumerFixture) -> set[str]:
    return {group.name for group in fixture.clients.consumer_groups()}


def test_other_requests_are_served_while_a_client_joins_many_groups(
    fixture: ConsumerFixture,
) -> None:
    answer = begin_heartbeat(fixture)
    assert len(registered(fixture)) == GROUPS_PER_STEP
    assert fixture.ask(LIST, consumerGroup="g0", client=2).code == 0
    assert finish(answer) == 500 // GROUPS_PER_STEP
    assert registered(fixture) == {f"g{number}" for number in range(500)}
    assert len(fixture.clients.producers("p")) == 1


def test_a_client_that_leaves_while_it_joins_many_groups_is_not_registered_again(
    fixture: ConsumerFixture,
) -> None:
    answer = begin_heartbeat(fixture)
    fixture.ask(UNREGISTER, clientID="c", producerGroup="p", consumerGroup="g499")
    fixture.ask(UNREGISTER, clientID="c", consumerGroup="g0")
    finish(answer)
    assert registered(fixture) == {f"g{number}" for number in range(1, 499)}
    assert fixture.clients.producers("p") == []
    fixture.ask(HEARTBEAT, beat("c", consumer("g0", "T"), producers=("p",)))
    assert "g0" in registered(fixture)
    assert len(fixture.clients.producers("p")) == 1


def test_a_client_that_disconnects_while_it_joins_many_groups_leaves_nothing(
    fixture: ConsumerFixture,
) -> None:
    answers = [begin_heartbeat(fixture), begin_heartbeat(fixture)]
    fixture.clients.disconnected(1)
    for answer in answers:
        finish(answer)
    assert registered(fixture) == set()
    assert fixture.clients.producer_groups() == {}
    assert fixture.clients.due() == NEVER_MS


def test_a_clock_that_is_set_while_a_client_joins_many_groups_makes_none_expire(
    fixture: ConsumerFixture,
) -> None:
    answer = begin_heartbeat(fixture)
    fixture.clients.clock_stepped(3_600_000)
    finish(answer)
    fixture.clients.tick(NOW_MS + 3_600_000)
    assert len(registered(fixture)) == 500


def test_heartbeats_in_steps_hold_a_limited_number_of_bytes(
    fixture: ConsumerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = begin_heartbeat(fixture)
    monkeypatch.setattr(heartbeats, "UNFINISHED_BYTES_MAX", 1)
    body = beat("d", *(consumer(f"h{number}", "T") for number in range(100)))
    second = Command(HEARTBEAT, {}, body, client=2, now_ms=NOW_MS)
    assert fixture.router.handle(second) == Reply(ext=FULL_HEARTBEATS_ONLY)
    assert {f"h{number}" for number in range(100)} <= registered(fixture)
    finish(answer)
    monkeypatch.undo()
    finish(begin_heartbeat(fixture, 400))


def test_an_empty_list_of_consumers_is_an_error(fixture: ConsumerFixture) -> None:
    reply = fixture.ask(LIST, consumerGroup="g")
    assert reply.code == 1
    assert reply.remark is not None
    assert reply.remark.startswith("no consumer for this group, g")
    assert fixture.ask(LIST).code == 29


@pytest.mark.parametrize(
    ("kind", "code"), [("TAG", 0), ("", 0), ("SQL92", 0), ("sql92", 23), ("CLASS", 23)]
)
def test_filters_of_known_types_are_accepted(
    fixture: ConsumerFixture, kind: str, code: int
) -> None:
    data = SubscriptionData(topic="T", sub_string="a > 1", expression_type=kind)
    body = CheckClientRequestBody(client_id="c", group="g", subscription_data=data)
    reply = fixture.ask(CHECK, fastjson.encode(body))
    assert reply.code == code
    if code:
        assert reply.remark is not None
        assert kind in reply.remark


def test_an_invalid_filter_is_refused_with_its_position(fixture: ConsumerFixture) -> None:
    data = SubscriptionData(topic="T", sub_string="a > 1 AND b >", expression_type="SQL92")
    body = CheckClientRequestBody(client_id="c", group="g", subscription_data=data)
    reply = fixture.ask(CHECK, fastjson.encode(body))
    assert reply.code == 23
    assert "column 14" in (reply.remark or "")


def test_a_check_without_a_subscription_succeeds(fixture: ConsumerFixture) -> None:
    assert fixture.ask(CHECK, b'{"clientId":"c","group":"g"}').code == 0
