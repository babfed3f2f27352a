"""Metadata queries of the Spark source, with a whole broker."""

from collections.abc import Iterator

import pytest

from penstock.arrow.cluster_metadata import ClusterMetadata
from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.source_options import SourceOptions, TopicSelection
from penstock.client import Admin, Message, Producer
from penstock.errors import NoQueue, NoRoute, ReadGaveUp
from penstock.testing.in_process_broker import InProcessBroker
from penstock.transport.peer import Peer, Response
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import ResponseCode

BROKER = "broker-a"


@pytest.fixture
def connection(penstock_broker: InProcessBroker) -> ConnectionOptions:
    return ConnectionOptions(nameservers=(penstock_broker.address,))


@pytest.fixture
def cluster(connection: ConnectionOptions) -> Iterator[ClusterMetadata]:
    with ClusterMetadata(connection, timeout_ms=300) as cluster:
        yield cluster


def queues(topic: str, count: int, broker: str = BROKER) -> set[MessageQueue]:
    return {MessageQueue(topic, broker, number) for number in range(count)}


def chosen(**options: str) -> TopicSelection:
    return SourceOptions.of(options).topics


def send(broker: InProcessBroker, topic: str, count: int) -> None:
    with Producer(broker.address) as producer:
        for number in range(count):
            producer.send(Message(topic, str(number)))


def test_topics_by_name_and_pattern(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    for topic in ("orders-eu", "orders-us", "bills"):
        penstock_broker.create_topic(topic, queues=2)
    both = queues("orders-eu", 2) | queues("orders-us", 2)
    assert cluster.required_queues(chosen(subscribe="orders-eu,orders-us")) == both
    assert cluster.required_queues(chosen(subscribePattern="orders-..")) == both
    assert cluster.required_queues(chosen(subscribePattern="orders")) == set()


def test_patterns_do_not_match_system_topics_and_topics_of_groups(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders", queues=1)
    penstock_broker.create_topic("%DLQ%billing", queues=1)
    penstock_broker.create_topic("PENSTOCK_SINK_CONTROL", queues=1)
    assert cluster.queues(chosen(subscribePattern=".*")) == queues("orders", 1)
    assert cluster.queues(chosen(subscribePattern="%DLQ%.*")) == queues("%DLQ%billing", 1)


def test_a_missing_topic_is_reported_at_once_with_a_similar_name(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders")
    with pytest.raises(NoRoute, match=r"'order'.*similar topics: orders"):
        cluster.required_queues(chosen(subscribe="order"))


def test_assigned_queues(penstock_broker: InProcessBroker, cluster: ClusterMetadata) -> None:
    penstock_broker.create_topic("orders", queues=2)
    topics = chosen(assign=f'{{"orders": {{"{BROKER}": [1]}}}}')
    assert cluster.required_queues(topics) == {MessageQueue("orders", BROKER, 1)}
    with pytest.raises(NoQueue, match=f"orders {BROKER} 2"):
        cluster.required_queues(chosen(assign=f'{{"orders": {{"{BROKER}": [1, 2]}}}}'))
    with pytest.raises(ReadGaveUp, match="orders broker-z 0"):  # the topic may be created later
        cluster.required_queues(chosen(assign='{"orders": {"broker-z": [0]}}'))


def test_offsets_at_the_ends_and_at_times(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders", queues=1)
    [queue] = queues("orders", 1)
    send(penstock_broker, "orders", 3)
    penstock_broker.clock.advance(minutes=5)
    send(penstock_broker, "orders", 2)
    [first, *_, last] = [m.store_ms for m in penstock_broker.messages("orders")]
    assert cluster.all_min_offsets([queue]) == {queue: 0}
    assert cluster.all_max_offsets([queue]) == {queue: 5}
    moments = [first - 1, first, first + 1, last, last + 1]
    found = [cluster.all_offsets_at([queue], moment)[queue] for moment in moments]
    assert found == [0, 0, 3, 3, 5]


def test_an_unavailable_broker_is_reported_or_waited_for(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders", queues=1)
    here, away = MessageQueue("orders", BROKER, 0), MessageQueue("orders", "broker-z", 0)
    ends = cluster.max_offsets([here, away])
    assert ends.offsets == {here: 0}
    assert list(ends.unavailable) == [away]
    assert ends.from_replica == {away}
    with pytest.raises(ReadGaveUp, match=r"broker-z.*waited 0.3 s"):
        cluster.all_max_offsets([here, away])


def test_an_offset_of_minus_one_from_apache_is_an_empty_queue(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a queue that does not exist yet, and for a search without a result."""
    penstock_broker.create_topic("orders", queues=1)
    [queue] = queues("orders", 1)
    answer_with(monkeypatch, cluster, Response(ResponseCode.SUCCESS, {"offset": "-1"}))
    assert cluster.all_min_offsets([queue]) == cluster.all_max_offsets([queue]) == {queue: 0}
    assert cluster.all_offsets_at([queue], 1) == {queue: 0}


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_ERROR, ResponseCode.FLOW_CONTROL])
def test_a_broker_that_can_not_answer_now_is_unavailable(
    penstock_broker: InProcessBroker,
    cluster: ClusterMetadata,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    penstock_broker.create_topic("orders", queues=1)
    [queue] = queues("orders", 1)
    answer_with(monkeypatch, cluster, Response(code, remark="not now"))
    assert list(cluster.max_offsets([queue]).unavailable) == [queue]
    with pytest.raises(ReadGaveUp, match="not now"):
        cluster.all_max_offsets([queue])


def answer_with(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterMetadata, answer: Response
) -> None:
    """Let brokers answer every request with this response."""

    async def call(self: Peer, *args: object, **how: object) -> Response:
        return answer

    cluster.queues(chosen(subscribe="orders"))  # the route is queried before
    monkeypatch.setattr(Peer, "call", call)
    monkeypatch.setattr(cluster._client._session, "find_route", _no_news)


async def _no_news(topic: str) -> None: ...


def test_unavailable_nameservers_are_reported() -> None:
    with (
        ClusterMetadata(ConnectionOptions(nameservers=("127.0.0.1:1",)), timeout_ms=1) as cluster,
        pytest.raises(ReadGaveUp, match="no NameServer answers"),
    ):
        cluster.required_queues(chosen(subscribe="orders"))


def test_deleted_queues_are_found(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders", queues=4)
    penstock_broker.create_topic("bills", queues=1)
    with Admin(penstock_broker.address) as admin:
        admin.update_topic("orders", queues=3)
        admin.delete_topic("bills")
    unknown = MessageQueue("orders", "broker-z", 0)
    asked = queues("orders", 4) | queues("bills", 1) | {unknown}
    gone = cluster.deleted_queues(asked)
    assert gone == {MessageQueue("orders", BROKER, 3), MessageQueue("bills", BROKER, 0)}


def test_committing_for_an_unknown_group_creates_it(
    penstock_broker: InProcessBroker, cluster: ClusterMetadata
) -> None:
    penstock_broker.create_topic("orders", queues=2)
    send(penstock_broker, "orders", 4)
    marks = {queue: 1 + queue.queue_id for queue in queues("orders", 2)}
    away = MessageQueue("orders", "broker-z", 0)
    assert cluster.commit_offsets("billing", {**marks, away: 7}) == marks
    with Admin(penstock_broker.address) as admin:
        progress = admin.progress("billing")
    assert {q.queue: q.committed for q in progress.queues} == marks


def test_names_have_no_namespace(penstock_broker: InProcessBroker) -> None:
    penstock_broker.create_topic("acme%orders", queues=1)
    penstock_broker.create_topic("orders", queues=1)
    send(penstock_broker, "acme%orders", 2)
    connection = ConnectionOptions(nameservers=(penstock_broker.address,), namespace="acme")
    with ClusterMetadata(connection, timeout_ms=300) as cluster:
        [queue] = cluster.required_queues(chosen(subscribePattern=".*"))
        assert queue == MessageQueue("orders", BROKER, 0)
        assert cluster.all_max_offsets([queue]) == {queue: 2}
        assert cluster.commit_offsets("billing", {queue: 2}) == {queue: 2}
