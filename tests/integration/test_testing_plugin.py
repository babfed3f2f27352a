"""`penstock.testing`: an in-process broker with a virtual clock."""

import asyncio
import importlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    Decision,
    Message,
    PopConsumer,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
)
from penstock.testing import InProcessBroker, clock_driver, in_process_cluster
from penstock.testing.plugin import (  # noqa: F401
    penstock_broker,
    penstock_consumer,
    penstock_producer,
    penstock_settings,
)
from tests.integration.loops import Run, run  # noqa: F401

ROOT = Path(__file__).parents[2]
RETRIES_S = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]

Make = Callable[..., Consumer]
Broker = InProcessBroker

pytestmark = pytest.mark.timeout(120)


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return [message.body for message in messages]


# --- time


def test_the_clock_stands_still_until_it_is_advanced(penstock_broker: Broker) -> None:  # noqa: F811
    clock = penstock_broker.clock
    before = clock.now_ms()
    assert abs(before - time.time() * 1000) < 60_000
    time.sleep(0.05)
    assert clock.now_ms() == before
    clock.advance(days=1, hours=2, minutes=3, seconds=4, ms=5)
    assert clock.now_ms() - before == (((24 + 2) * 60 + 3) * 60 + 4) * 1000 + 5
    assert clock.now().timestamp() * 1000 == pytest.approx(clock.now_ms())
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(days=-1)


def test_delayed_messages_are_delivered_when_they_are_due(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
) -> None:
    broker, producer = penstock_broker, penstock_producer
    producer.send(Message("T", b"level", delay_level=4))
    producer.send(Message("T", b"span", delay=timedelta(days=3)))
    due = broker.clock.now() + timedelta(hours=1)
    receipt = producer.send(Message("T", b"moment", deliver_at=due))
    recalled = producer.send(Message("T", b"recalled", delay=timedelta(days=2)))
    assert receipt.recall_handle
    assert recalled.recall_handle
    assert producer.recall("T", recalled.recall_handle)
    broker.clock.advance(seconds=29)
    assert broker.messages("T") == []
    broker.clock.advance(seconds=1)
    assert bodies(broker.messages("T")) == [b"level"]
    broker.clock.advance(hours=1)
    assert sorted(bodies(broker.messages("T"))) == [b"level", b"moment"]
    broker.clock.advance(days=3)
    messages = {message.body: message for message in broker.messages("T")}
    assert sorted(messages) == [b"level", b"moment", b"span"]
    assert abs(messages[b"moment"].store_ms - due.timestamp() * 1000) < 20


def test_a_failing_message_is_retried_16_times_and_becomes_a_dead_letter(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
    penstock_consumer: Make,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("orders", queues=2)
    consumer = penstock_consumer(group="billing")
    seen: list[tuple[int, int]] = []

    @consumer.on("orders")
    def bill(message: ReceivedMessage) -> None:
        seen.append((broker.clock.now_ms(), message.reconsume_times))
        raise ValueError("no such customer")

    consumer.start()
    penstock_producer.send(Message("orders", b"42"))
    broker.wait_until(lambda: seen)
    broker.clock.advance(days=3)
    assert [times for _, times in seen] == list(range(17))
    gaps = [(after[0] - before[0]) / 1000 for before, after in pairwise(seen)]
    assert gaps == pytest.approx(RETRIES_S, abs=0.1)
    assert bodies(broker.dead_letters("billing")) == [b"42"]
    assert len(broker.retries("billing")) == 16
    assert "%DLQ%billing" in broker.topics()


def test_async_tests_await_the_clock(run: Run, penstock_broker: Broker) -> None:  # noqa: F811
    async def body() -> None:
        broker = penstock_broker
        broker.create_topic("T")
        seen: list[int] = []
        consumer = AsyncConsumer(broker.address, group="G", start_at="first")

        @consumer.on("T")
        async def handle(message: ReceivedMessage) -> bool:
            seen.append(message.reconsume_times)
            await asyncio.sleep(0.005)
            return message.reconsume_times >= 3

        async with AsyncProducer(broker.address) as producer, consumer:
            await producer.send(Message("T", b"1", delay_level=1))
            await broker.clock.advance(seconds=1)
            await broker.wait_until(lambda: seen)
            await broker.clock.advance(hours=1)
            assert seen == [0, 1, 2, 3]
            assert broker.dead_letters("G") == []

            async def is_settled() -> bool:
                return all(state.in_work == 0 for state in consumer.queues())

            await broker.wait_until(is_settled)
            with pytest.raises(TimeoutError, match="was not true within"):
                await broker.wait_until(lambda: False, seconds=0.01)

    run(body())


def test_a_message_kept_by_the_test_does_not_stop_the_clock(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
    penstock_consumer: Make,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("T", queues=1)
    consumer = penstock_consumer(group="G")
    consumer.subscribe("T")
    penstock_producer.send(Message("T", b"1"))
    messages = iter(consumer)
    message = next(messages)
    assert message.body == b"1"
    message.retry()
    before = broker.clock.now_ms()
    broker.clock.advance(days=3)
    assert broker.clock.now_ms() - before == 3 * 86_400_000
    penstock_producer.send(Message("T", b"2"))
    assert next(messages).body == b"2"
    broker.clock.advance(seconds=10)
    again = next(messages)
    assert (again.body, again.reconsume_times) == (b"1", 1)


def test_orderly_consumers_continue_after_days(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
    penstock_consumer: Make,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("T", queues=2)
    consumer = penstock_consumer(group="G", orderly=True)
    seen: list[bytes] = []
    consumer.on("T")(lambda message: seen.append(message.body))
    consumer.start()
    for turn in range(3):
        for number in range(5):
            penstock_producer.send(Message("T", b"%d" % (5 * turn + number)), ordering_key="a")
        broker.wait_until(lambda wanted=5 * (turn + 1): len(seen) == wanted)
        broker.clock.advance(days=3)
    assert seen == [b"%d" % number for number in range(15)]


def test_clients_stay_registered_when_days_pass(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
    penstock_consumer: Make,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("T")
    consumer = penstock_consumer(group="G")
    seen: list[bytes] = []
    consumer.on("T")(lambda message: seen.append(message.body))
    consumer.start()
    for turn in range(4):
        penstock_producer.send(Message("T", b"%d" % turn))
        broker.wait_until(lambda wanted=turn + 1: len(seen) == wanted)
        broker.clock.advance(days=100)
    assert seen == [b"0", b"1", b"2", b"3"]


def test_pop_waits_in_real_time_and_invisible_time_is_virtual(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("T", queues=1)
    with PopConsumer(broker.address, group="G", start_at="first") as consumer:
        consumer.subscribe("T")
        consumer.start()
        assert consumer.receive(wait_ms=50) == []
        broker.clock.advance(days=3)
        began = time.monotonic()
        assert consumer.receive(wait_ms=200) == []
        assert time.monotonic() - began > 0.1
        penstock_producer.send(Message("T", b"1"))
        [message] = consumer.receive(wait_ms=5_000, invisible_ms=60_000)
        assert message.body == b"1"
        assert consumer.receive(wait_ms=20) == []
        broker.clock.advance(seconds=61)
        [again] = consumer.receive(wait_ms=5_000)
        assert (again.body, again.reconsume_times) == (b"1", 1)
        consumer.ack(again)
        broker.clock.advance(days=1)
        assert consumer.receive(wait_ms=20) == []


def test_polls_and_commits_work_over_days(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
) -> None:
    broker = penstock_broker
    broker.create_topic("T", queues=1)
    with PullConsumer(broker.address, group="G", start_at="first") as consumer:
        consumer.subscribe("T")
        for turn in range(3):
            penstock_producer.send(Message("T", b"%d" % turn))
            found: list[ReceivedMessage] = []
            while not found:
                found = consumer.poll(5_000)
            assert bodies(found) == [b"%d" % turn]
            consumer.commit()
            broker.clock.advance(days=2)
        [queue] = consumer.queues("T")
        assert consumer.committed(queue) == 3


def test_open_transactions_are_checked(penstock_broker: Broker) -> None:  # noqa: F811
    broker = penstock_broker
    broker.create_topic("T")
    asked: list[bytes] = []

    def check(message: ReceivedMessage) -> Decision:
        asked.append(message.body)
        time.sleep(0.05)  # a slow check: the clock waits for its answer
        return Decision.COMMIT if message.body == b"kept" else Decision.ROLLBACK

    with TransactionProducer(broker.address, group="P", check=check) as producer:
        with producer.transaction(Message("T", b"done")):
            pass
        with pytest.raises(KeyError), producer.transaction(Message("T", b"undone")):
            raise KeyError
        for body in (b"kept", b"given up"):
            producer.prepare(Message("T", body))
        assert bodies(broker.messages("T")) == [b"done"]
        broker.clock.advance(minutes=5)
        assert len(broker.messages("T")) == 2
    assert sorted(asked) == [b"given up", b"kept"]
    assert sorted(bodies(broker.messages("T"))) == [b"done", b"kept"]


def test_a_restart_keeps_messages_and_the_time(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
) -> None:
    broker = penstock_broker
    penstock_producer.send(Message("T", b"1"))
    penstock_producer.send(Message("T", b"2", delay_level=5))
    before, address = broker.clock.now_ms(), broker.broker_address
    broker.clock.advance(seconds=30)
    broker.restart()
    assert broker.broker_address == address
    assert broker.clock.now_ms() - before < 40_000
    assert bodies(broker.messages("T")) == [b"1"]
    broker.clock.advance(seconds=30)
    assert sorted(bodies(broker.messages("T"))) == [b"1", b"2"]
    penstock_producer.send(Message("T", b"3"))
    assert sorted(bodies(broker.messages("T"))) == [b"1", b"2", b"3"]


# --- the broker


def test_settings_and_a_data_directory_can_be_given(tmp_path: Path) -> None:
    with InProcessBroker({"store.sync_flush": True}, data=tmp_path / "data") as broker:
        with Producer(broker.address) as producer:
            producer.send(Message("T", b"1"))
            producer.send(Message("T", b"late", delay_level=1))
        broker.clock.advance(seconds=2)
        assert sorted(bodies(broker.messages("T"))) == [b"1", b"late"]
    with InProcessBroker(data=tmp_path / "data") as broker:
        assert sorted(bodies(broker.messages("T"))) == [b"1", b"late"]


def test_several_brokers_run_side_by_side_and_leave_no_files() -> None:
    before = threading.active_count()
    with InProcessBroker() as one, InProcessBroker() as other:
        with Producer(one.address) as producer:
            producer.send(Message("T", b"1"))
        assert len(one.messages("T")) == 1
        assert other.messages("T") == []
        one.clock.advance(days=1)
        assert one.clock.now_ms() - other.clock.now_ms() > 80_000_000
    assert "penstock-test-broker" not in [thread.name for thread in threading.enumerate()]
    assert threading.active_count() <= before + 1  # that of the synchronous clients


# --- errors


def test_a_broker_that_fails_to_start_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TypeError, match="no_such"):
        InProcessBroker({"broker.no_such": 1}).start()
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with taken, pytest.raises(OSError, match=str(port)):
        InProcessBroker({"nameserver.port": port}).start()
    assert "penstock-test-broker" not in [thread.name for thread in threading.enumerate()]
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    free_port = in_process_cluster._free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(in_process_cluster, "_free_port", lambda: next(ports))
        with InProcessBroker() as broker:
            broker.create_topic("T")


def test_the_clock_stands_still_after_another_start(tmp_path: Path) -> None:
    broker = InProcessBroker(data=tmp_path)
    for _ in range(2):
        with broker:
            with Producer(broker.address) as producer:
                producer.send(Message("T", b"late", delay_level=1))
            before = broker.clock.now_ms()
            time.sleep(0.05)
            assert broker.clock.now_ms() - before < 20
            broker.clock.advance(seconds=2)
    with broker:
        assert bodies(broker.messages("T")) == [b"late"] * 2


def test_a_broker_that_is_never_closed_leaves_no_files(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from penstock.testing import InProcessBroker
        broker = InProcessBroker()
        broker.start()
        if os.fork() == 0:
            sys.exit(0)  # this one must not remove its parent's files
        os.wait()
        broker.create_topic("T")
        print(len(os.listdir(os.environ["TMPDIR"])))
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_clients_that_are_never_idle_do_not_stop_the_clock(
    penstock_broker: Broker,  # noqa: F811
    penstock_producer: Producer,  # noqa: F811
    penstock_consumer: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clock_driver, "BUSY_MS", 300)
    penstock_broker.create_topic("T")
    consumer = penstock_consumer(group="G")

    @consumer.on("T")
    def answer(message: ReceivedMessage) -> None:
        penstock_producer.send(Message("T", b"another"))

    consumer.start()
    penstock_producer.send(Message("T", b"first"))
    before = penstock_broker.clock.now_ms()
    penstock_broker.clock.advance(days=1)
    assert penstock_broker.clock.now_ms() - before >= 86_400_000
    assert "clients were busy" in caplog.text


def test_all_consumers_are_closed_if_closing_one_fails(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        textwrap.dedent(
            """
            from penstock import Consumer

            close = Consumer.close
            made = []

            def close_and_fail(self):
                close(self)
                if self is made[-1]:
                    raise LookupError("not today")

            def test_two(penstock_consumer, monkeypatch):
                monkeypatch.setattr(Consumer, "close", close_and_fail)
                for name in ("first", "second"):
                    made.append(penstock_consumer(group=name))
                    made[-1].subscribe("T")
                    made[-1].start()
                raise KeyError("the test itself")

            def test_nothing_is_left():
                assert not any(consumer._started for consumer in made)
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "penstock.testing.plugin"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr


# --- the plugin

SAMPLE = """
    import asyncio
    import pytest
    from penstock import AsyncProducer, Message

    def test_orders_that_fail_are_dead_letters(
        penstock_broker, penstock_producer, penstock_consumer
    ):
        penstock_broker.create_topic("orders")
        consumer = penstock_consumer(group="billing")

        @consumer.on("orders")
        def bill(message):
            raise ValueError("no such customer")

        consumer.start()
        penstock_producer.send(Message("orders", b"42", keys=["42"]))
        penstock_broker.wait_until(lambda: penstock_broker.messages("orders"))
        penstock_broker.clock.advance(days=3)
        [dead] = penstock_broker.dead_letters("billing")
        assert (dead.body, dead.keys) == (b"42", ["42"])

    def test_each_test_has_a_broker_of_its_own(penstock_broker):
        assert penstock_broker.topics() == []

    def test_asyncio(penstock_broker):
        async def body():
            async with AsyncProducer(penstock_broker.address) as producer:
                await producer.send(Message("T", b"x", delay_level=18))
            await penstock_broker.clock.advance(hours=2)
            assert len(penstock_broker.messages("T")) == 1
        asyncio.run(body())

    @pytest.fixture
    def penstock_settings():
        return {"broker.name": "mine"}

    def test_settings_may_be_changed(penstock_broker, penstock_producer):
        assert penstock_producer.send(Message("T", b"x")).queue.broker_name == "mine"

    def test_nothing_is_imported_without_need(request):
        import sys
        assert "penstock.testing.plugin" in sys.modules
"""


def test_the_plugin_works_in_other_projects(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(textwrap.dedent(SAMPLE))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "penstock.testing.plugin"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_pytest_loads_the_plugin_automatically() -> None:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, module)] = project["entry-points"]["pytest11"].items()
    assert name == "penstock"
    assert hasattr(importlib.import_module(module), "penstock_broker")


def test_the_plugin_imports_the_broker_on_first_use() -> None:
    code = """if True:
        import sys
        import pytest
        before = set(sys.modules)
        import penstock.testing.plugin
        print(*sorted(name for name in set(sys.modules) - before))
    """
    env = {name: value for name, value in os.environ.items() if name != "PENSTOCK_PURE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == [
        "penstock",
        "penstock.lazy",
        "penstock.testing",
        "penstock.testing.plugin",
        "penstock.version",
    ]
