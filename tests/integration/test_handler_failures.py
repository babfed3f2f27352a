"""A handler that raises is visible in a program that has not configured logging."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import threading

    import penstock
    from penstock.testing import InProcessBroker

    with InProcessBroker() as broker:
        broker.create_topic("orders", queues=1)
        with penstock.Producer(broker.address) as producer:
            for number in range(12):
                producer.send(penstock.Message("orders", b"%d" % number))
        consumer = penstock.KIND(broker.address, group="billing", start_at="first")
        calls = []

        @consumer.on("orders")
        DEF bill(message):
            calls.append(message)
            raise ValueError("no such customer")

        consumer.start()
        if "KIND" == "PopConsumer":
            threading.Thread(target=consumer.run).start()
        broker.wait_until(lambda: len(calls) == 12)
        broker.wait_until(lambda: any("12 times" in text for text in consumer.explain()))
        print(*consumer.explain(), sep="\\n")
        if "KIND" == "Consumer":
            (queue,) = [state for state in consumer.queues() if state.queue.topic == "orders"]
            print(queue.last_failure)
        consumer.stop()
"""


@pytest.mark.parametrize("kind", ["Consumer", "PopConsumer"])
@pytest.mark.parametrize("function", ["def", "async def"])
def test_failing_handler_is_visible_without_logging_configuration(kind: str, function: str) -> None:
    program = PROGRAM.replace("KIND", kind).replace("DEF", function)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("Traceback") == 1, ran.stderr
    assert "penstock: billing: the handler of topic orders failed for message" in ran.stderr
    assert "the handler of topic orders failed 10 times: ValueError: no such" in ran.stderr
    explained, *last = ran.stdout.splitlines()
    assert explained.startswith("the handler of topic orders failed 12 times, the last time")
    if kind == "Consumer":
        assert last == ["ValueError: no such customer (<string>:18)"]
