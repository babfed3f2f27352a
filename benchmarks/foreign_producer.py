"""One round of PyPI's `rocketmq-python-client`, run in its own virtual environment.

Arguments and output are those of client_producer, with the gRPC endpoint instead of NameServers.
"""

import json
import sys
import threading
import time

from rocketmq import ClientConfiguration, Credentials, Message, Producer  # type: ignore


def main() -> None:
    endpoint, topic, in_flight, warm, seconds, size = sys.argv[1:7]
    producer = Producer(ClientConfiguration(endpoint, Credentials(), ""), (topic,))
    producer.startup()
    slots = threading.Semaphore(int(in_flight))
    counts = {"sent": 0, "failed": 0}

    def done(future: object) -> None:
        counts["failed" if future.exception() else "sent"] += 1  # type: ignore[attr-defined]
        slots.release()

    def send_for(duration: float) -> None:
        end = time.monotonic() + duration
        while time.monotonic() < end:
            slots.acquire()
            message = Message()
            message.topic = topic
            message.body = b"x" * int(size)
            producer.send_async(message).add_done_callback(done)

    send_for(float(warm))
    before = dict(counts)
    started, cpu = time.monotonic(), time.process_time()
    send_for(float(seconds))
    result = {
        "messages": counts["sent"] - before["sent"],
        "failed": counts["failed"] - before["failed"],
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
    }
    print(json.dumps(result), flush=True)
    producer.shutdown()


main()
