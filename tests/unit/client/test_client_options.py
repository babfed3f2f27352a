"""Options of clients, namespaces and routes."""

import inspect
import ssl
from datetime import datetime, timedelta
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import AsyncProducer, Consumer, Producer, TransactionProducer
from penstock.client.client_options import TRACE_TOPIC, ClientKeywords, ClientOptions
from penstock.client.messages import Message
from penstock.client.namespace import with_namespace, without_namespace
from penstock.client.topic_routes import Route, address_to_read
from penstock.errors import BadSetting, BodyError, MessageIllegal
from penstock.wire.bodies.client_bodies import BrokerData, MessageQueue, QueueData, TopicRouteData


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ("a:1", ("a:1",)),
        ("a:1;b:2", ("a:1", "b:2")),
        ("a:1, b:2;", ("a:1", "b:2")),
        (["a:1", "[::1]:2"], ("a:1", "[::1]:2")),
        ("http://names/list", ("http://names/list",)),
    ],
)
def test_nameservers_are_given_as_text_list_or_url(
    given_: str | list[str], meant: tuple[str, ...]
) -> None:
    assert ClientOptions(given_).addresses == meant


def test_nameservers_default_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "names:9876")
    assert ClientOptions().addresses == ("names:9876",)
    monkeypatch.delenv("NAMESRV_ADDR")
    assert ClientOptions().addresses == ("127.0.0.1:9876",)


@pytest.mark.parametrize("bad", ["localhost", "localhost:x", ":1", "", ";", "a:70000"])
def test_bad_nameserver_address_is_refused(bad: str) -> None:
    with pytest.raises(BadSetting, match="NameServer"):
        ClientOptions(bad)


def test_access_key_without_secret_key_is_refused() -> None:
    with pytest.raises(BadSetting, match="belong together"):
        ClientOptions("a:1", access_key="me")


@pytest.mark.parametrize("name", ["timeout_ms", "heartbeat_ms", "route_refresh_ms"])
def test_times_must_be_positive(name: str) -> None:
    keywords: dict[str, Any] = {name: 0}
    with pytest.raises(BadSetting, match=f"{name} is 0"):
        ClientOptions("a:1", **keywords)


@pytest.mark.parametrize("client", [AsyncProducer, Producer])
def test_unknown_option_suggests_a_similar_one(client: type) -> None:
    with pytest.raises(TypeError, match=r"AsyncProducer\(\).*acces_key.*access_key"):
        client("a:1", acces_key="me")
    with pytest.raises(TypeError, match=r"'zzz'$"):
        client("a:1", zzz=1)


def test_group_is_required_where_there_is_no_default() -> None:
    assert AsyncProducer("a:1").group == "penstock"
    for client in (TransactionProducer, Consumer):
        with pytest.raises(TypeError, match="group"):
            client("a:1")  # type: ignore[call-arg]


def test_signatures_show_every_option_with_its_default() -> None:
    parameters = inspect.signature(Producer).parameters
    assert next(iter(parameters)) == "nameservers"
    assert parameters["retries"].default == 2
    assert parameters["retries"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["timeout_ms"].default == 3_000
    assert inspect.signature(Consumer).parameters["group"].default is inspect.Parameter.empty


def test_client_keywords_are_those_of_client_options() -> None:
    options = get_type_hints(ClientOptions)
    del options["nameservers"], options["_"]
    assert get_type_hints(ClientKeywords) == options


def test_tls_and_trace_accept_true() -> None:
    options = ClientOptions("a:1", ssl=True, trace=True)
    assert options.ssl_context is not None
    assert options.ssl_context.verify_mode == ssl.CERT_NONE
    assert options.ssl_context is options.ssl_context
    assert options.trace_topic == TRACE_TOPIC
    context = ssl.create_default_context()
    options = ClientOptions("a:1", ssl=context, trace="MyTraces")
    assert options.ssl_context is context
    assert options.trace_topic == "MyTraces"
    assert ClientOptions("a:1", ssl=False).ssl_context is None


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("orders", "acme%orders"),
        ("%RETRY%billing", "%RETRY%acme%billing"),
        ("%DLQ%billing", "%DLQ%acme%billing"),
        ("acme%orders", "acme%orders"),
        ("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRACE_TOPIC"),
        ("rmq_sys_x", "rmq_sys_x"),
    ],
)
def test_namespace_is_added_to_a_name(name: str, full: str) -> None:
    assert with_namespace("acme", name) == full
    assert with_namespace("", name) == name


@given(st.sampled_from(["", "%RETRY%", "%DLQ%"]), st.text("abcXYZ_-", min_size=1))
def test_namespace_is_removed_again(prefix: str, name: str) -> None:
    full = with_namespace("tenant", prefix + name)
    assert without_namespace("tenant", full) == prefix + name


def route(**parts: object) -> Route:
    brokers = [
        BrokerData(broker_name="b", broker_addrs={0: "b:1", 1: "b:2"}),
        BrokerData(broker_name="a", broker_addrs={0: "a:1"}),
        BrokerData(broker_name="slave-only", broker_addrs={1: "s:1"}),
    ]
    queues = [
        QueueData(broker_name="b", read_queue_nums=2, write_queue_nums=1, perm=6),
        QueueData(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=4),
        QueueData(broker_name="slave-only", read_queue_nums=1, write_queue_nums=1, perm=6),
    ]
    data = TopicRouteData(queue_datas=queues, broker_datas=brokers, **parts)  # type: ignore[arg-type]
    return Route.of("T", data)


def test_route_has_writable_and_readable_queues() -> None:
    assert route().write_queues == (MessageQueue("T", "b", 0),)
    assert route().read_queues == (
        MessageQueue("T", "a", 0),
        MessageQueue("T", "b", 0),
        MessageQueue("T", "b", 1),
        MessageQueue("T", "slave-only", 0),
    )


def test_order_configuration_fixes_the_queues() -> None:
    ordered = route(order_topic_conf="a:1;b:2;nonsense;c:x")
    assert [(q.broker_name, q.queue_id) for q in ordered.write_queues] == [
        ("a", 0), ("b", 0), ("b", 1),
    ]  # fmt: skip


def test_address_of_an_unknown_broker_id_falls_back_to_another_of_its_set() -> None:
    addresses = route().addresses
    assert address_to_read(addresses["b"], 1) == "b:2"
    assert address_to_read(addresses["b"], 7) == "b:1"
    assert address_to_read(addresses["slave-only"], 0) == "s:1"
    assert address_to_read({3: "three:1", 2: "two:1"}, 7) == "two:1"
    assert address_to_read({}, 0) is None


def test_message_accepts_a_str_body_and_a_single_key() -> None:
    message = Message("T", "häh", keys="k")
    assert (message.content, message.keys) == ("häh".encode(), ("k",))


def test_message_needs_a_topic_and_has_at_most_one_delay() -> None:
    with pytest.raises(MessageIllegal, match="has no topic"):
        Message("")
    with pytest.raises(MessageIllegal, match="more than one delay"):
        Message("T", delay_level=1, delay=timedelta(seconds=1))
    with pytest.raises(MessageIllegal, match="more than one delay"):
        Message("T", deliver_at=datetime(2030, 1, 1), delay=timedelta(seconds=1))


@pytest.mark.parametrize("priority", [-1, 2**31])
def test_priority_has_the_range_of_java(priority: int) -> None:
    assert Message("T", priority=0).priority == 0
    with pytest.raises(MessageIllegal, match=f"priority is {priority}"):
        Message("T", priority=priority)


def test_message_with_a_priority_cannot_have_a_delay() -> None:
    with pytest.raises(MessageIllegal, match="cannot have a delay"):
        Message("T", priority=1, delay_level=2)


def test_route_with_too_many_queues_is_refused() -> None:
    queues = [QueueData(broker_name="a", read_queue_nums=2**31 - 1, write_queue_nums=1, perm=6)]
    with pytest.raises(BodyError, match="queues"):
        Route.of("t", TopicRouteData(queue_datas=queues))
    with pytest.raises(BodyError, match="queues"):
        Route.of("t", TopicRouteData(order_topic_conf="a:999999999"))
