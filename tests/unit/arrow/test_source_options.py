"""Options of the Spark source: types, names, contradictions."""

import pickle
from collections.abc import Callable

import pytest

from penstock.arrow.connection_options import CONNECTION_OPTIONS, ConnectionOptions, OptionReader
from penstock.arrow.source_options import SourceOptions
from penstock.errors import BadSetting, TlsError
from penstock.wire.bodies.client_bodies import MessageQueue


def given(**options: str) -> OptionReader:
    return OptionReader(options, ("count", "span", "switch", "moment", "word"), what="test")


def source(**options: str) -> SourceOptions:
    return SourceOptions.of(options)


def stream(**options: str) -> SourceOptions:
    return SourceOptions.of(options, stream=True)


def test_option_names_are_case_insensitive() -> None:
    options = source(SUBSCRIBE="orders", FailOnDataloss="FALSE", nameServer="h:1;g:2")
    assert options.topics.names == ("orders",)
    assert not options.fail_on_data_loss
    assert options.connection.nameservers == ("h:1", "g:2")


def test_unknown_option_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(BadSetting, match="did you mean startingOffsets") as failure:
        source(subscribe="orders", startingOffset="earliest")
    assert "subscribePattern" in failure.value.hint


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("30s", 30_000), ("500 ms", 500), ("2H", 7_200_000), ("7", 7)],
)
def test_durations_are_parsed(text: str, ms: int) -> None:
    assert given(span=text).duration_ms("span", default=1) == ms


@pytest.mark.parametrize("text", ["", "0s", "-1s", "1.5m", "5 years", "m", "9" * 30])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="the option span"):
        given(span=text).duration_ms("span", default=1)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1700000000000", 1_700_000_000_000), ("2023-11-14T22:13:20+00:00", 1_700_000_000_000),
     ("2023-11-14T22:13:20.250Z", 1_700_000_000_250)],
)  # fmt: skip
def test_timestamps_are_parsed(text: str, ms: int) -> None:
    assert given(moment=text).timestamp_ms("moment") == ms


@pytest.mark.parametrize(
    ("name", "text"),
    [("moment", "yesterday"), ("moment", "9" * 17), ("count", "0"), ("count", "-1"),
     ("count", "many"), ("count", "²"), ("switch", "yes"), ("word", "c")],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name: str, text: str) -> None:
    options = given(**{name: text})
    read: dict[str, Callable[[], object]] = {
        "moment": lambda: options.timestamp_ms("moment"),
        "count": lambda: options.count("count"),
        "switch": lambda: options.boolean("switch", default=False),
        "word": lambda: options.choice("word", ("a", "b"), default="a"),
    }
    with pytest.raises(BadSetting, match=name):
        read[name]()


@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "no topic is named"),
     ({"subscribe": "a", "subscribePattern": "b"}, "subscribe and subscribePattern contradict"),
     ({"subscribe": " , "}, "subscribe"),
     ({"subscribe": ""}, "subscribe is empty"),
     ({"subscribePattern": "("}, "subscribePattern"),
     ({"assign": "[]"}, "assign"),
     ({"assign": '{"a": {"b": []}}'}, "names no queues"),
     ({"assign": '{"a": {"b": [true]}}'}, "names no queues"),
     ({"subscribe": "a", "startingOffsets": "first"}, "startingOffsets"),
     ({"subscribe": "a", "startingOffsets": "{"}, "not valid JSON"),
     ({"subscribe": "a", "startingOffsets": "{}"}, "has no queue"),
     ({"subscribe": "a", "startingOffsets": '{"b": {"x": {"0": 1}}}'}, "b x 0, which is not read"),
     ({"subscribe": "a", "startingOffsets": '{"a": {"x": {"0": -3}}}'}, "-3"),
     ({"subscribe": "a", "startingOffsets": '{"a": {"x": {"q": 3}}}'}, "not a queue"),
     ({"subscribe": "a", "startingOffsets": '{"a": {"x": [1]}}'}, "should be an object"),
     ({"subscribe": "a", "startingOffsets": "latest"}, "can't be latest"),
     ({"subscribe": "a", "startingOffsets": '{"a": {"x": {"0": -1}}}'}, "can't be -1"),
     ({"subscribe": "a", "endingOffsets": "earliest"}, "can't be earliest"),
     ({"subscribe": "a", "startingOffsets": "earliest", "startingTimestamp": "1"}, "contradict"),
     ({"subscribe": "a", "startingTimestamp": "2", "endingTimestamp": "1"}, "is after"),
     ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, "for streams only"),
     ({"subscribe": "a", "path": "/x"}, "mode=log only"),
     ({"subscribe": "a", "mode": "fast"}, "mode"),
     ({"subscribe": "a", "columns": "body,price"}, "price"),
     ({"subscribe": "a", "accessKey": "me"}, "belong together"),
     ({"subscribe": "a", "tlsCa": "/x"}, "needs tls"),
     ({"subscribe": "a", "tls": "true", "tlsKey": "/x"}, "needs tlsCert"),
     ({"subscribe": "a", "nameserver": "here"}, "NameServer"),
     ({"mode": "log"}, "path"),
     ({"mode": "log", "path": "/x", "assign": '{"a": {"b": [0]}}'}, "does not apply to mode=log")],
)  # fmt: skip
def test_bad_options_of_a_batch_read_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        source(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"endingOffsets": "latest"}, "batch reads only"),
     ({"endingTimestamp": "1"}, "batch reads only"),
     ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "minOffsetsPerTrigger is 5"),
     ({"mode": "log", "path": "/x"}, "can't be a stream")],
)  # fmt: skip
def test_bad_options_of_a_stream_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(BadSetting, match=text):
        stream(subscribe="a", **options)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "names:9876")
    batch, endless = source(subscribe="a, b,a"), stream(subscribePattern="a.*")
    assert (batch.starting, batch.ending, endless.starting) == ("earliest", "latest", "latest")
    assert batch.topics.names == ("a", "b")
    assert endless.topics.pattern == "a.*"
    assert batch.connection.nameservers == ("names:9876",)
    assert batch.group == "penstock-spark-source"
    assert batch.commit_group is None
    assert batch.fail_on_data_loss
    assert endless.trigger_delay_ms == 900_000


def test_group_names() -> None:
    assert source(subscribe="a", groupIdPrefix="etl").group == "etl-source"
    options = stream(subscribe="a", groupIdPrefix="etl", commitGroup="billing")
    assert (options.group, options.commit_group) == ("billing", "billing")


def test_offsets_per_queue_are_parsed() -> None:
    options = source(subscribe="a", startingOffsets='{"a": {"x": {"0": 7, "1": -2}}}')
    assert options.starting == {MessageQueue("a", "x", 0): 7, MessageQueue("a", "x", 1): -2}


def test_log_mode_needs_no_topic() -> None:
    options = source(mode="LOG", path="/store", startingTimestamp="5", brokerName="b")
    assert (options.log_path, options.starting_ms, options.broker) == ("/store", 5, "b")


def test_connection_options_pickle_and_hide_the_secret() -> None:
    options = {"nameserver": "h:1", "accessKey": "me", "secretKey": "hush", "namespace": "acme"}
    connection = ConnectionOptions.of(OptionReader(options, CONNECTION_OPTIONS, what="test"))
    again = pickle.loads(pickle.dumps(connection))
    assert again == connection
    assert hash(again) == hash(connection)
    assert "hush" not in repr(connection)
    client = again.client_options()
    assert (client.nameservers, client.secret_key, client.namespace) == (("h:1",), "hush", "acme")
    assert client.ssl_context is None


def test_tls_without_ca_verifies_nothing_and_missing_file_is_named() -> None:
    plain = OptionReader({"nameserver": "h:1", "tls": "true"}, CONNECTION_OPTIONS, what="test")
    context = ConnectionOptions.of(plain).client_options().ssl_context
    assert context is not None
    assert not context.check_hostname
    options = {"tls": "true", "tlsCa": "/nowhere/ca.pem"}
    connection = ConnectionOptions.of(OptionReader(options, CONNECTION_OPTIONS, what="test"))
    with pytest.raises(TlsError, match="nowhere"):
        connection.client_options()
