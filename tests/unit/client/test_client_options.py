"""What clients are told, the names of tenants, and the queues of a route."""

import ssl
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.client_options import TRACE_TOPIC, ClientKeywords, ClientOptions
from penstock.client.messages import Message
from penstock.client.namespace import with_namespace, without_namespace
from penstock.client.topic_routes import Route
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
def test_nameservers_in_all_their_forms(given_: str | list[str], meant: tuple[str, ...]) -> None:
    assert ClientOptions.of(given_, {}).nameservers == meant


def test_nameservers_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "names:9876")
    assert ClientOptions.of(None, {}).nameservers == ("names:9876",)
    monkeypatch.delenv("NAMESRV_ADDR")
    assert ClientOptions.of(None, {}).nameservers == ("127.0.0.1:9876",)


@pytest.mark.parametrize("bad", ["localhost", "localhost:x", ":1", "", ";", "a:70000"])
def test_an_address_that_is_none_is_refused_by_name(bad: str) -> None:
    with pytest.raises(BadSetting, match="NameServer"):
        ClientOptions.of(bad, {})


def test_a_key_without_its_secret_is_refused() -> None:
    with pytest.raises(BadSetting, match="belong together"):
        ClientOptions.of("a:1", {"access_key": "me"})


@pytest.mark.parametrize("name", ["timeout_ms", "heartbeat_ms", "route_refresh_ms"])
def test_times_must_be_positive(name: str) -> None:
    keywords: ClientKeywords = {name: 0}  # type: ignore[misc]
    with pytest.raises(BadSetting, match=f"{name} is 0"):
        ClientOptions.of("a:1", keywords)


def test_an_unknown_option_names_the_known_ones() -> None:
    keywords: ClientKeywords = {"acces_key": "me"}  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"acces_key.*access_key"):
        ClientOptions.of("a:1", keywords)


def test_tls_and_trace_by_a_plain_true() -> None:
    options = ClientOptions.of("a:1", {"ssl": True, "trace": True})
    assert options.ssl is not None
    assert options.ssl.verify_mode == ssl.CERT_NONE
    assert options.trace_topic == TRACE_TOPIC
    context = ssl.create_default_context()
    options = ClientOptions.of("a:1", {"ssl": context, "trace": "MyTraces"})
    assert options.ssl is context
    assert options.trace_topic == "MyTraces"
    assert ClientOptions.of("a:1", {"ssl": False}).ssl is None


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
def test_names_of_a_tenant(name: str, full: str) -> None:
    assert with_namespace("acme", name) == full
    assert with_namespace("", name) == name


@given(st.sampled_from(["", "%RETRY%", "%DLQ%"]), st.text("abcXYZ_-", min_size=1))
def test_a_namespace_comes_off_as_it_went_on(prefix: str, name: str) -> None:
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


def test_queues_are_those_that_may_be_used() -> None:
    assert route().write_queues == (MessageQueue("T", "b", 0),)
    assert route().read_queues == (
        MessageQueue("T", "a", 0),
        MessageQueue("T", "b", 0),
        MessageQueue("T", "b", 1),
        MessageQueue("T", "slave-only", 0),
    )


def test_an_order_configuration_fixes_the_queues() -> None:
    ordered = route(order_topic_conf="a:1;b:2;nonsense;c:x")
    assert [(q.broker_name, q.queue_id) for q in ordered.write_queues] == [
        ("a", 0), ("b", 0), ("b", 1),
    ]  # fmt: skip


def test_addresses_fall_back_to_another_of_the_same_name() -> None:
    assert route().address("b", 1) == "b:2"
    assert route().address("b", 7) == "b:1"
    assert route().address("slave-only") == "s:1"
    assert route().address("unknown") is None


def test_a_message_takes_text_and_single_keys() -> None:
    message = Message("T", "häh", keys="k")
    assert (message.content, message.keys) == ("häh".encode(), ("k",))


def test_a_message_needs_a_topic_and_waits_in_one_way_only() -> None:
    with pytest.raises(MessageIllegal, match="has no topic"):
        Message("")
    with pytest.raises(MessageIllegal, match="more than one delay"):
        Message("T", delay_level=1, delay=timedelta(seconds=1))
    with pytest.raises(MessageIllegal, match="more than one delay"):
        Message("T", deliver_at=datetime(2030, 1, 1), delay=timedelta(seconds=1))


def test_a_route_of_absurdly_many_queues_is_refused() -> None:
    queues = [QueueData(broker_name="a", read_queue_nums=2**31 - 1, write_queue_nums=1, perm=6)]
    with pytest.raises(BodyError, match="queues"):
        Route.of("t", TopicRouteData(queue_datas=queues))
    with pytest.raises(BodyError, match="queues"):
        Route.of("t", TopicRouteData(order_topic_conf="a:999999999"))
