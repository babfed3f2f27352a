"""The metrics of a running broker: what was sent and consumed is in them."""

import re
import time
import urllib.request
from collections.abc import Iterator

import pytest

from penstock import Consumer, Message, Producer
from tests.compat.penstock import Up

PATIENCE_S = 60
SENT = 25


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scrape after some sends, of which a group has consumed some."""
    with Up(tmp_path_factory.mktemp("up")) as up:
        with Producer(up.address) as producer:
            for _ in range(SENT):
                producer.send(Message("metered", b"x" * 2000))
            got: list[object] = []
            with Consumer(up.address, group="meter", start_at="first") as consumer:
                consumer.on("metered")(lambda message: got.append(message))
                consumer.start()
                deadline = time.monotonic() + PATIENCE_S
                while len(got) < SENT and time.monotonic() < deadline:
                    time.sleep(0.05)
            for _ in range(8):
                producer.send(Message("metered", b"x"))
        port = int(up.broker_address.rpartition(":")[2]) + 2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            yield page.read().decode()


def value(text: str, name: str, *labels: str) -> float:
    """The sum of the samples of a metric that have these labels."""
    found = re.findall(rf"^{name}({{.*?}})? (\S+)$", text, flags=re.MULTILINE)
    chosen = [float(number) for shown, number in found if all(one in shown for one in labels)]
    assert chosen, f"no {name} with {labels}"
    return sum(chosen)


def test_every_send_has_its_latency(text: str) -> None:
    sends = value(text, "rocketmq_rpc_latency_count", 'request_code="send_message_v2"')
    assert sends == SENT + 8
    assert value(text, "rocketmq_rpc_latency_sum", 'request_code="send_message_v2"') > 0
    # The first one created the topic, and was answered after its registration.
    assert value(text, "penstock_append_seconds_count") == SENT + 8 - 1


def test_pulls_have_their_latency(text: str) -> None:
    assert value(text, "rocketmq_rpc_latency_count", 'request_code="pull_message"') > 0
    assert value(text, "rocketmq_rpc_latency_count", 'request_code="heart_beat"') > 0


def test_sizes_are_counted(text: str) -> None:
    assert value(text, "rocketmq_message_size_bucket", 'le="1024"') >= 8
    large = value(text, "rocketmq_message_size_bucket", 'le="4096"')
    assert large - value(text, "rocketmq_message_size_bucket", 'le="1024"') == SENT


def test_lag_in_messages_and_time(text: str) -> None:
    labels = ('consumer_group="meter"', 'topic="metered"')
    assert value(text, "rocketmq_consumer_lag_messages", *labels) == 8
    assert value(text, "rocketmq_consumer_ready_messages", *labels) == 8
    assert 0 <= value(text, "rocketmq_consumer_lag_latency", *labels) < PATIENCE_S * 1000
    assert value(text, "rocketmq_storage_message_reserve_time") >= 0


def test_flushes_and_loop_lag_are_there(text: str) -> None:
    assert value(text, "penstock_flush_seconds_count") >= 0
    assert value(text, "penstock_loop_lag_seconds_count") >= 0
