"""Which queues a consumer gets, and whether it pulls or pops them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.consumers import assignment
from penstock.broker.consumers.allocation import (
    STRATEGIES,
    TopicQueues,
    allocate_for_pop,
    allocate_for_pull,
)
from penstock.config import Settings
from penstock.errors import Refused
from penstock.rpc.answers import QueryRoute, Reply
from penstock.rpc.command import Command
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    HeartbeatData,
    MessageQueue,
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    QueueData,
    SetMessageRequestModeRequestBody,
    TopicConfig,
    TopicRouteData,
)
from penstock.wire.bodies.table_bodies import MessageRequestModeSerializeWrapper
from penstock.wire.codes import RequestCode, ResponseCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, broker_fixture

QUERY, SET, GET_ALL = (
    RequestCode.QUERY_ASSIGNMENT,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
)

# --- allocation ----------------------------------------------------------------------------------

PULLING = None

# Strategy, queues (three on broker a, the others on b), consumers, helpers, and what each of them
# got from QueryAssignmentProcessor of RocketMQ 5.4.0; -1 stands for all queues of a broker.
JAVA = [
    ("AVG", 5, 3, PULLING, "a0 a1|a2 b0|b1"),
    ("AVG", 8, 3, PULLING, "a0 a1 a2|b0 b1 b2|b3 b4"),
    ("AVG", 3, 5, PULLING, "a0|a1|a2||"),
    ("AVG_BY_CIRCLE", 5, 3, PULLING, "a0 b0|a1 b1|a2"),
    ("AVG_BY_CIRCLE", 3, 5, PULLING, "a0|a1|a2||"),
    ("AVG", 5, 3, -1, "a-1 b-1|a-1 b-1|a-1 b-1"),
    ("AVG", 5, 3, 1, "a0 a1 a2 b0|a2 b0 b1|b1 a0 a1"),
    ("AVG", 5, 3, 2, "a-1 b-1|a-1 b-1|a-1 b-1"),
    ("AVG", 5, 1, 1, "a-1 b-1"),
    ("AVG", 3, 5, 2, "a0|a1|a2|a0|a1"),
    ("AVG", 5, 5, 2, "a0 a1 a2|a1 a2 b0|a2 b0 b1|b0 b1 a0|b1 a0 a1"),
    ("AVG_BY_CIRCLE", 5, 3, 1, "a0 b0 a1 b1|a1 b1 a2|a2 a0 b0"),
]


def spread(queues: int) -> TopicQueues:
    return TopicQueues("T", {"b": max(queues - 3, 0), "a": min(queues, 3)})


@pytest.mark.parametrize(("name", "queues", "consumers", "helpers", "expected"), JAVA)
def test_allocation_matches_java(
    name: str, queues: int, consumers: int, helpers: int | None, expected: str
) -> None:
    ids = [f"c{number}" for number in range(consumers)]
    shares = []
    for client_id in ids:
        if helpers is None:
            share = allocate_for_pull(STRATEGIES[name], client_id, spread(queues), ids)
        else:
            share = allocate_for_pop(STRATEGIES[name], client_id, spread(queues), ids, helpers)
        shares.append(" ".join(f"{queue.broker_name}{queue.queue_id}" for queue in share or ()))
    assert "|".join(shares) == expected


strategies = st.sampled_from(sorted(STRATEGIES))


@given(strategies, st.integers(1, 200), st.integers(1, 50))
def test_pulled_queues_belong_to_one_consumer_each(name: str, queues: int, consumers: int) -> None:
    ids = [f"c{number:03}" for number in range(consumers)]
    shares = [allocate_for_pull(STRATEGIES[name], one, spread(queues), ids) or [] for one in ids]
    assert sorted(queue for share in shares for queue in share) == list(spread(queues))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(strategies, st.integers(1, 60), st.integers(1, 50), st.integers(-1, 60))
def test_every_popped_queue_and_every_consumer_is_used(
    name: str, queues: int, consumers: int, helpers: int
) -> None:
    ids = [f"c{number:03}" for number in range(consumers)]
    all_queues = spread(queues)
    shares = [
        allocate_for_pop(STRATEGIES[name], one, all_queues, ids, helpers) or [] for one in ids
    ]
    assert all(shares)
    taken = {queue for share in shares for queue in share}
    whole = {queue.broker_name for queue in taken if queue.queue_id == -1}
    assert all(queue in taken or queue.broker_name in whole for queue in all_queues)


def test_a_topic_with_a_million_queues_is_allocated_lazily() -> None:
    queues = TopicQueues("T", {"a": 1 << 20, "b": 1 << 20, "empty": 0})
    assert len(queues) == 1 << 21
    assert queues[-1:] == [MessageQueue("T", "b", (1 << 20) - 1)]
    ids = [f"c{number:07}" for number in range(1 << 17)]
    share = allocate_for_pull(STRATEGIES["AVG"], ids[-1], queues, ids)
    assert share is not None
    assert len(share) == 16


def test_a_client_outside_of_the_group_gets_nothing() -> None:
    for share in (
        allocate_for_pull(STRATEGIES["AVG"], "stranger", spread(8), ["c0", "c1", "c2"]),
        allocate_for_pop(STRATEGIES["AVG"], "stranger", spread(8), ["c0", "c1", "c2", "c3"], 1),
    ):
        assert share == []
    assert allocate_for_pull(STRATEGIES["AVG"], "c0", spread(0), ["c0"]) is None


# --- the requests --------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[BrokerFixture]:
    """A broker without NameServers, with the topic T of four queues."""
    with broker_fixture(tmp_path) as made:
        make_topic(made)
        yield made


@pytest.fixture
def member(tmp_path: Path) -> Iterator[BrokerFixture]:
    """A broker of a cluster."""
    settings = Settings(store=small_config(sync_flush=False))
    broker = msgspec.structs.replace(settings.broker, nameservers="127.0.0.1:1")
    with broker_fixture(tmp_path, msgspec.structs.replace(settings, broker=broker)) as made:
        make_topic(made)
        yield made


def make_topic(made: BrokerFixture, topic: str = "T", queues: int = 4, perm: int = 6) -> None:
    config = TopicConfig(
        topic_name=topic, read_queue_nums=queues, write_queue_nums=queues, perm=perm
    )
    made.context.topics.put(config, NOW_MS)


def join(made: BrokerFixture, *client_ids: str) -> None:
    """Let consumers of G connect."""
    for number, client_id in enumerate(client_ids, 10):
        data = HeartbeatData(
            client_id=client_id,
            consumer_data_set=[ConsumerData(group_name="G", message_model="CLUSTERING")],
        )
        command = Command(
            RequestCode.HEART_BEAT, {}, fastjson.encode(data), client=number, now_ms=made.now_ms
        )
        made.finish(made.broker.handle(command))


def question(topic: str = "T", client_id: str = "c1", **fields: str) -> bytes:
    return fastjson.encode(
        QueryAssignmentRequestBody(
            topic=topic,
            consumer_group="G",
            client_id=client_id,
            strategy_name=fields.get("strategy", "AVG"),
            message_model=fields.get("model", "CLUSTERING"),
        )
    )


def assigned(
    made: BrokerFixture, body: bytes, route: TopicRouteData | None = None
) -> list[str] | None:
    """Mode, broker and queue of each assignment; None if the response has none."""
    answer = made.broker.handle(Command(QUERY, {}, body, client=1, now_ms=made.now_ms))
    if isinstance(answer, QueryRoute):
        answer = answer.then(route)
    reply = made.finish(answer)
    assert isinstance(reply, Reply)
    assert reply.code == 0, reply
    notified = fastjson.decode(reply.body, QueryAssignmentResponseBody).message_queue_assignments
    return None if notified is None else [text(one) for one in notified]


def text(assignment: MessageQueueAssignment) -> str:
    queue = assignment.message_queue
    assert queue is not None
    return f"{assignment.mode} {queue.topic} {queue.broker_name} {queue.queue_id}"


def set_mode(made: BrokerFixture, mode: str = "POP", share: int = 0, topic: str = "T") -> Reply:
    body = SetMessageRequestModeRequestBody(
        topic=topic, consumer_group="G", mode=mode, pop_share_queue_num=share
    )
    return made.ask(SET, {}, fastjson.encode(body))


def route(*brokers: tuple[str, int, int]) -> TopicRouteData:
    return TopicRouteData(
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
            for name, queues, perm in brokers
        ]
    )


def test_queues_are_allocated_by_client_id(alone: BrokerFixture) -> None:
    join(alone, "c2", "c1", "c3")
    assert assigned(alone, question(client_id="c1")) == ["PULL T broker-a 0", "PULL T broker-a 1"]
    assert assigned(alone, question(client_id="c2")) == ["PULL T broker-a 2"]
    assert assigned(alone, question(client_id="c3")) == ["PULL T broker-a 3"]
    assert assigned(alone, question(client_id="c1", strategy="AVG_BY_CIRCLE")) == [
        "PULL T broker-a 0",
        "PULL T broker-a 3",
    ]
    assert assigned(alone, question(client_id="c9")) == [], "it has to give up what it has"


def test_a_broadcasting_client_gets_all_queues(alone: BrokerFixture) -> None:
    assert assigned(alone, question(model="BROADCASTING")) == [
        f"PULL T broker-a {number}" for number in range(4)
    ]


@pytest.mark.parametrize("model", ["BROADCASTING", "CLUSTERING"])
def test_an_assignment_of_too_many_queues_is_refused(alone: BrokerFixture, model: str) -> None:
    make_topic(alone, queues=1_000_000)
    join(alone, "c1", "c2")
    with pytest.raises(Refused, match=r"too many queues of the topic T: .*the limit is 100000"):
        alone.ask(QUERY, {}, question(model=model))
    assert set_mode(alone).code == 0
    if model == "CLUSTERING":
        assert assigned(alone, question()) == ["POP T broker-a -1"]


@pytest.mark.slow
def test_a_pop_assignment_of_too_many_shared_queues_is_refused(alone: BrokerFixture) -> None:
    make_topic(alone, queues=200_000)
    join(alone, "c1", "c2", "c3", "c4")
    assert len(assigned(alone, question()) or []) == 50_000
    assert set_mode(alone, share=2).code == 0
    with pytest.raises(Refused, match="150000 queues"):
        alone.ask(QUERY, {}, question())


def test_the_number_of_request_modes_is_limited(
    alone: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignment, "MODES_MAX", 1)
    make_topic(alone, "T2")
    assert set_mode(alone).code == 0
    refused = set_mode(alone, topic="T2")
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "too many request modes" in (refused.remark or "")
    assert set_mode(alone, "PULL").code == 0


def test_an_unknown_assignment_changes_nothing(alone: BrokerFixture) -> None:
    assert assigned(alone, question()) is None, "nobody of the group is connected"
    join(alone, "c1")
    assert assigned(alone, question(topic="unknown")) is None
    assert assigned(alone, question(topic="%RETRY%other")) is None
    assert assigned(alone, question(strategy="CONSISTENT_HASH")) is None
    make_topic(alone, "closed", perm=2)
    assert assigned(alone, question(topic="closed")) is None
    assert alone.ask(QUERY, {}, question(topic="unknown")).body == b"{}"


def test_a_pop_group_shares_whole_brokers(alone: BrokerFixture) -> None:
    join(alone, "c1", "c2", "c3", "c4")
    assert set_mode(alone).code == 0
    assert assigned(alone, question()) == ["POP T broker-a -1"]
    assert set_mode(alone, share=1).code == 0
    assert assigned(alone, question(client_id="c4")) == ["POP T broker-a 3", "POP T broker-a 0"]
    assert set_mode(alone, "PULL").code == 0
    assert assigned(alone, question(client_id="c4")) == ["PULL T broker-a 3"]


def test_retry_topics_are_always_pulled(alone: BrokerFixture) -> None:
    alone.live.change({"broker.default_request_mode": "POP"})
    make_topic(alone, "%RETRY%G", 1)
    join(alone, "c1")
    assert assigned(alone, question()) == ["POP T broker-a -1"]
    assert assigned(alone, question(topic="%RETRY%G")) == ["PULL %RETRY%G broker-a 0"]


def test_every_client_gets_all_queues_without_broker_side_allocation(alone: BrokerFixture) -> None:
    alone.live.change({"broker.share_queues": "false"})
    assert len(assigned(alone, question()) or ()) == 4


def test_a_light_queue_is_on_this_broker(member: BrokerFixture) -> None:
    join(member, "c1")
    assert assigned(member, question(topic="%LMQ%a")) == ["PULL %LMQ%a broker-a 0"]


def test_queues_of_all_brokers_are_allocated(member: BrokerFixture) -> None:
    join(member, "c1", "c2")
    three = route(("broker-b", 2, 6), ("broker-a", 4, 4), ("closed", 4, 2))
    assert assigned(member, question(), three) == [
        "PULL T broker-a 0",
        "PULL T broker-a 1",
        "PULL T broker-a 2",
    ]
    assert assigned(member, question(client_id="c2"), three) == [
        "PULL T broker-a 3",
        "PULL T broker-b 0",
        "PULL T broker-b 1",
    ]
    set_mode(member)
    assert assigned(member, question(), three) == ["POP T broker-a -1", "POP T broker-b -1"]


def test_an_unreachable_nameserver_takes_no_queues_away(member: BrokerFixture) -> None:
    join(member, "c1")
    assert assigned(member, question()) is None, "whether there are other brokers is not known"
    assert len(assigned(member, question(), route(("broker-b", 2, 6))) or ()) == 2
    assert len(assigned(member, question()) or ()) == 2
    list(member.context.topics.delete("T", NOW_MS))
    assert assigned(member, question()) is None
    make_topic(member)
    assert assigned(member, question()) is None, "the topic was gone meanwhile"


def test_invalid_requests_are_refused(alone: BrokerFixture) -> None:
    for body in (
        question(topic=""),
        question(client_id=""),
        question(model="SHOUTING"),
        b'{"topic":"T","consumerGroup":"G","clientId":"c"}',
        b"[]",
    ):
        assert alone.ask(QUERY, {}, body).code == ResponseCode.INVALID_PARAMETER
    assert set_mode(alone, "PUSH").code == ResponseCode.INVALID_PARAMETER
    assert set_mode(alone, topic="unknown").code == ResponseCode.TOPIC_NOT_EXIST
    assert set_mode(alone, topic="%RETRY%G").code == ResponseCode.NO_PERMISSION
    alone.live.change({"broker.auto_create_groups": "false"})
    assert set_mode(alone).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert alone.ask(GET_ALL).body == b'{"messageRequestModeMap":{}}'


def test_modes_survive_a_restart(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as made:
        make_topic(made)
        assert set_mode(made, share=3).code == 0
        file = (tmp_path / "config/messageRequestMode.json").read_bytes()
    # As RocketMQ 5.4.0 writes it.
    assert file == (
        b'{\n\t"messageRequestModeMap":{\n\t\t"T":{\n\t\t\t"G":{\n\t\t\t\t"consumerGroup":"G",'
        b'\n\t\t\t\t"mode":"POP",\n\t\t\t\t"popShareQueueNum":3,\n\t\t\t\t"topic":"T"\n\t\t\t}'
        b"\n\t\t}\n\t}\n}"
    )
    with broker_fixture(tmp_path) as made:
        notified = fastjson.decode(made.ask(GET_ALL).body, MessageRequestModeSerializeWrapper)
        assert notified.message_request_mode_map["T"]["G"].pop_share_queue_num == 3
        join(made, "c1")
        assert assigned(made, question()) == ["POP T broker-a -1"]
