"""Synchronous clients across a fork: the child continues or gets an error, the parent continues."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
    pytest.mark.timeout(120),
]

HEAD = """
import multiprocessing, os, sys, threading, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
from penstock import *
from penstock.errors import ClientForked
from penstock.testing import InProcessBroker

def child(work, leave=os._exit):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            leave(code)
    return pid

def wait(*pids):
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def bodies(topic="T"):
    return sorted(message.body.decode() for message in broker.messages(topic))

broker = InProcessBroker()
broker.start()
broker.create_topic("T")
"""


def run(code: str) -> None:
    code = HEAD + textwrap.dedent(code) + "\nbroker.close()\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_producer_works_in_the_child_and_in_the_parent() -> None:
    run(
        """
        with Producer(broker.address, group="P") as producer:
            producer.send(Message("T", "before"))
            wait(child(lambda: producer.send(Message("T", "child"))))
            for number in range(3):
                producer.send(Message("T", f"parent {number}"))
        assert bodies() == ["before", "child", "parent 0", "parent 1", "parent 2"], bodies()
        """
    )


def test_the_exit_of_a_child_does_not_affect_the_connections_of_the_parent() -> None:
    """Also if it exits normally, with all clean-up of the interpreter."""
    run(
        """
        import gc
        producer = Producer(broker.address)
        producer.start()
        producer.send(Message("T", "before"))

        def forget():
            global producer
            producer.close()
            producer = None
            gc.collect()

        for number in range(5):
            pid = os.fork()
            if pid == 0:
                if number % 2:
                    producer.send(Message("T", f"child {number}"))
                else:
                    forget()
                sys.exit(0)
            wait(pid)
            producer.send(Message("T", f"parent {number}"))
        producer.close()
        assert len(bodies()) == 1 + 2 + 5, bodies()
        """
    )


def test_workers_of_a_preloading_server_share_no_connection() -> None:
    """As gunicorn with --preload: the parent sends while it forks, and so do the children."""
    run(
        """
        producer = Producer(broker.address)
        producer.start()
        stop = threading.Event()
        sent = []

        def keep_sending():
            while not stop.is_set():
                producer.send(Message("T", f"parent {len(sent)}"))
                sent.append(1)

        thread = threading.Thread(target=keep_sending)
        thread.start()

        def work(number):
            for turn in range(20):
                assert producer.send(Message("T", f"child {number}.{turn}")).message_id
            producer.close()

        pids = [child(lambda: work(number)) for number in range(4)]
        wait(*pids)
        stop.set()
        thread.join()
        producer.close()
        assert len(set(bodies())) == 80 + len(sent)
        ids = [message.unique_id for message in broker.messages("T")]
        assert len(set(ids)) == len(ids)
        """
    )


def test_multiprocessing_may_use_an_inherited_producer() -> None:
    run(
        """
        producer = Producer(broker.address)
        producer.start()

        def send(number):
            return producer.send(Message("T", f"child {number}")).queue.topic

        context = multiprocessing.get_context("fork")
        with context.Pool(3) as pool:
            assert pool.map(send, range(12)) == ["T"] * 12
        producer.send(Message("T", "parent"))
        producer.close()
        assert len(bodies()) == 13
        """
    )


def test_transaction_producers_admins_and_pull_consumers_work_after_a_fork() -> None:
    run(
        """
        transactions = TransactionProducer(broker.address, group="P")
        admin = Admin(broker.address)
        puller = PullConsumer(broker.address, group="G", start_at="first")
        for client in (transactions, admin, puller):
            client.start()
        puller.assign(puller.queues("T"))
        handle = transactions.prepare(Message("T", "begun here, committed there"))

        def work():
            transactions.commit(handle)
            assert "T" in admin.topic_names()
            found = []
            while not found:
                found = puller.poll(5_000)
            assert [message.body for message in found] == [b"begun here, committed there"]
            for client in (transactions, admin, puller):
                client.close()

        wait(child(work))
        assert puller.poll(0) is not None
        for client in (transactions, admin, puller):
            client.close()
        """
    )


def test_a_consumer_started_before_the_fork_raises_in_the_child() -> None:
    run(
        """
        seen = []
        consumer = Consumer(broker.address, group="G", start_at="first")
        consumer.on("T")(lambda message: seen.append(message.body))
        consumer.start()
        popper = PopConsumer(broker.address, group="H", start_at="first")
        popper.subscribe("T")
        popper.start()

        def work():
            for call in (consumer.queues, consumer.run, popper.receive):
                try:
                    call()
                except ClientForked as error:
                    assert str(os.getppid()) in str(error), error
                    assert "after the fork" in error.hint
                else:
                    raise AssertionError(f"{call} went on")
            consumer.close()
            popper.close()

        wait(child(work))
        with Producer(broker.address) as producer:
            producer.send(Message("T", "for the parent"))
        broker.wait_until(lambda: seen)
        [message] = popper.receive(wait_ms=5_000)
        popper.ack(message)
        consumer.close()
        popper.close()
        """
    )


def test_a_consumer_can_be_started_in_the_child() -> None:
    run(
        """
        reading, writing = os.pipe()
        consumer = Consumer(broker.address, group="G", start_at="first")

        @consumer.on("T")
        def handle(message):
            os.write(writing, message.body)
            consumer.stop()

        with Producer(broker.address) as producer:
            producer.send(Message("T", "hello"))
            pid = child(consumer.run)
            assert os.read(reading, 100) == b"hello"
            wait(pid)
        """
    )


def test_a_child_of_a_handler_handles_its_own_signals() -> None:
    """`run` handles SIGTERM, by which `multiprocessing` ends its workers."""
    run(
        """
        import signal, time
        codes = []
        consumer = Consumer(broker.address, group="G", start_at="first")

        @consumer.on("T")
        def handle(message):
            reading, writing = os.pipe()
            pid = child(lambda: (os.write(writing, b"!"), time.sleep(60)))
            os.read(reading, 1)
            os.kill(pid, signal.SIGTERM)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            consumer.stop()

        with Producer(broker.address) as producer:
            producer.send(Message("T", "hello"))
        consumer.run()
        assert codes == [-signal.SIGTERM], codes
        """
    )


def test_iterators_and_futures_raise_in_the_child() -> None:
    run(
        """
        from penstock.errors import ClientClosed
        consumer = Consumer(broker.address, group="G", start_at="first")
        consumer.subscribe("T")
        producer = Producer(broker.address)
        producer.start()
        producer.send(Message("T", "first"))
        messages = iter(consumer)
        assert next(messages).body == b"first"
        admin = Admin(broker.address)
        admin.start()
        follow = admin.follow("T", start_at="first")
        next(follow)
        from penstock.client.sync.loop_thread import loop_thread
        hold = threading.Event()  # so that the future is not done at the fork
        loop_thread().call_soon(lambda: hold.wait(30))
        future = producer.submit(Message("T", "second"))

        def work():
            for call, kind in (
                (lambda: next(messages), ClientForked), (lambda: next(follow), ClientForked),
                (future.result, ClientClosed),
            ):
                try:
                    call()
                except kind:
                    continue
                raise AssertionError(f"{call} went on")

        pid = child(work, sys.exit)
        hold.set()
        wait(pid)
        assert future.result(10)
        assert next(messages).body == b"second"
        for client in (consumer, producer, admin):
            client.close()
        """
    )
