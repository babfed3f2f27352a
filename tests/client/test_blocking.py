"""The synchronous clients in threads, scripts and forked workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from penstock import (
    Consumer,
    Decision,
    Message,
    PopConsumer,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
)
from penstock.errors import ClientClosed, PenstockError

from .environment import QUICK, Environment, numbers, text

WAIT_S = 40.0


def _options(env: Environment, group: str, **options: Any) -> dict[str, Any]:
    return {"nameservers": env.nameservers, "group": env.name(group), **QUICK, **options}


def _until(done: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_producer_and_a_consumer(env: Environment) -> None:
    topic = env.topic()
    came: list[str] = []
    with Producer(**_options(env, "p")) as producer:
        receipts = [producer.send(Message(topic, body)) for body in numbers(10)]
        receipts += producer.send_batch([Message(topic, body) for body in numbers(10, 10)])
        producer.send_oneway(Message(topic, "20"))
        futures = [producer.submit(Message(topic, body)) for body in numbers(10, 21)]
        receipts += [future.result() for future in futures]
        assert len(producer.queues(topic)) == 8
    assert len({receipt.message_id for receipt in receipts}) == 30
    with Consumer(**_options(env, "c", start_at="first", rebalance_ms=1_000)) as consumer:

        @consumer.on(topic)
        def handle(message: ReceivedMessage) -> None:
            came.append(message.body.decode())

        runner = threading.Thread(target=consumer.run)
        runner.start()
        _until(lambda: len(came) == 31)
        consumer.close()
        runner.join(20)
        assert not runner.is_alive(), "run returns when the consumer is closed"
    assert sorted(came, key=int) == numbers(31)
    _until(lambda: env.progress(topic, env.name("c")) == 31)


def test_a_consumer_can_be_iterated(env: Environment) -> None:
    topic = env.topic()
    with Producer(**_options(env, "p")) as producer:
        producer.send_batch([Message(topic, body) for body in numbers(20)])
    bodies: list[str] = []
    with Consumer(**_options(env, "c", start_at="first")) as consumer:
        consumer.subscribe(topic)
        for message in consumer:
            bodies.append(message.body.decode())
            if len(bodies) == 20:
                break
    assert sorted(bodies, key=int) == numbers(20)


def test_many_threads_share_a_producer(env: Environment) -> None:
    topic = env.topic()
    with Producer(**_options(env, "p")) as producer:

        def work(first: int) -> None:
            for body in numbers(25, first):
                producer.send(Message(topic, body))

        threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(text(env.stored(topic)))) == 200


def test_transactions(env: Environment) -> None:
    topic = env.topic()
    options = _options(env, "tx", check=lambda message: Decision.COMMIT)
    with TransactionProducer(**options) as producer:
        with producer.transaction(Message(topic, "committed")):
            pass
        with pytest.raises(ZeroDivisionError), producer.transaction(Message(topic, "rolled back")):
            raise ZeroDivisionError
        handle = producer.prepare(Message(topic, "by handle"))
        producer.commit(handle)
        producer.prepare(Message(topic, "asked about"))
        _until(lambda: len(env.stored(topic)) == 3)
    assert sorted(text(env.stored(topic))) == ["asked about", "by handle", "committed"]


def test_a_pull_consumer(env: Environment) -> None:
    topic = env.topic(queues=2)
    with Producer(**_options(env, "p")) as producer:
        for queue in producer.queues(topic):
            producer.send_batch([Message(topic, body) for body in numbers(5)], queue=queue)
    with PullConsumer(**_options(env, "c")) as consumer:
        queues = list(consumer.queues(topic))
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        got: list[ReceivedMessage] = []
        while len(got) < 20:
            got += consumer.poll(timeout_ms=5_000)
        consumer.commit()
        assert [consumer.committed(queue) for queue in queues] == [5] * 4
    assert len({(m.queue, m.queue_offset) for m in got}) == 20


def test_a_pop_consumer(env: Environment) -> None:
    topic = env.topic(queues=1)
    with (
        Producer(**_options(env, "p")) as producer,
        PopConsumer(**_options(env, "c", start_at="first")) as consumer,
    ):
        consumer.subscribe(topic)
        for body in numbers(6):
            producer.send(Message(topic, body))
        got: list[ReceivedMessage] = []
        while len(got) < 6:
            got += consumer.receive(count_max=8, wait_ms=1_000, invisible_ms=30_000)
        for message in got:
            consumer.ack(message)
    assert sorted(message.body.decode() for message in got) == numbers(6)


def test_request_and_reply(env: Environment) -> None:
    topic = env.topic()
    with (
        Consumer(**_options(env, "c", start_at="first", rebalance_ms=1_000)) as consumer,
        Producer(**_options(env, "p")) as producer,
    ):

        @consumer.on(topic)
        def serve(message: ReceivedMessage) -> None:
            consumer.reply(message, message.body.upper())

        runner = threading.Thread(target=consumer.run)
        runner.start()
        reply = producer.request(Message(topic, "hello"), timeout_ms=30_000)
        assert reply.body == b"HELLO"
        consumer.close()
        runner.join(20)
        assert not runner.is_alive()


def test_a_producer_that_is_not_started_or_closed_raises(env: Environment) -> None:
    topic = env.topic()
    producer = Producer(**_options(env, "p"))
    with pytest.raises(ClientClosed):
        producer.send(Message(topic, "x"))
    with producer:
        producer.send(Message(topic, "x"))
    with pytest.raises(ClientClosed):
        producer.send(Message(topic, "x"))
    producer.close()


async def test_synchronous_calls_inside_an_event_loop_are_refused(env: Environment) -> None:
    producer = Producer(**_options(env, "p"))
    with pytest.raises(PenstockError) as caught:
        producer.start()
    assert "Async" in f"{caught.value} {caught.value.hint}"
    await asyncio.sleep(0)


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from penstock import Producer, Consumer, Message
from penstock.errors import ClientForked

nameservers, group, topic = sys.argv[1:]
with Producer(nameservers, group=group) as producer:
    producer.send(Message(topic, "parent 1"))
    pids = []
    for child in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                producer.send(Message(topic, f"child {child}"))
                code = 0
            except ClientForked as error:
                print(error, file=sys.stderr)
                code = 3
            finally:
                os._exit(code)
        pids.append(pid)
    codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
    producer.send(Message(topic, "parent 2"))
    print(*codes)
"""


def test_a_producer_after_a_fork_works_or_raises(env: Environment) -> None:
    """In a child a producer works or raises a clear error; the parent's continues."""
    topic = env.topic()
    done = subprocess.run(
        [sys.executable, "-c", FORK, env.nameservers, env.name("p"), topic],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code = done.stdout.strip()
    assert code in ("0", "3"), done.stderr
    bodies = sorted(text(env.stored(topic)))
    if code == "0":
        assert bodies == ["child 0", "child 1", "parent 1", "parent 2"]
        ids = [message.unique_id for message in env.stored(topic)]
        assert len(set(ids)) == 4, "a child makes ids of its own"
    else:
        assert bodies == ["parent 1", "parent 2"]
        assert "fork" in done.stderr or "process" in done.stderr


FORGET = """
import sys
from penstock import Consumer, Message, Producer

nameservers, group, topic = sys.argv[1:]
producer = Producer(nameservers, group=group)
producer.start()
producer.send(Message(topic, "x"))
consumer = Consumer(nameservers, group=group + "-c", start_at="first")
seen = []

@consumer.on(topic)
def handle(message):
    seen.append(message)

consumer.start()
"""


def test_a_script_that_does_not_close_its_producer_exits(env: Environment, tmp_path: Any) -> None:
    topic = env.topic()
    done = subprocess.run(
        [sys.executable, "-c", FORGET, env.nameservers, env.name("p"), topic],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    assert text(env.stored(topic)) == ["x"]


def test_ctrl_c_stops_a_running_consumer(env: Environment) -> None:
    import signal

    script = (
        "import sys\nfrom penstock import Consumer\n"
        "with Consumer(sys.argv[1], group=sys.argv[2], start_at='first') as consumer:\n"
        "    @consumer.on(sys.argv[3])\n"
        "    def handle(message):\n"
        "        print(message.body.decode(), flush=True)\n"
        "    consumer.run()\n"
    )
    topic = env.topic()
    with Producer(**_options(env, "p")) as producer:
        producer.send(Message(topic, "hello"))
    command = [sys.executable, "-c", script, env.nameservers, env.name("c"), topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hello\n"
        process.send_signal(signal.SIGINT)
        process.wait(30)
    _until(lambda: env.progress(topic, env.name("c")) == 1)  # finished messages are committed
