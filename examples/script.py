"""A script that sends a few messages and consumes them.

    python examples/script.py [NAMESERVERS]

The default of NAMESERVERS is NAMESRV_ADDR, else 127.0.0.1:9876.
"""

import sys
import threading

from penstock import Consumer, Message, Producer, ReceivedMessage


def main() -> None:
    nameservers = sys.argv[1] if len(sys.argv) > 1 else None
    unread = set()
    with Producer(nameservers, group="greeters") as producer:
        for name in ("Ada", "Grace", "Barbara"):
            receipt = producer.send(Message("Greetings", f"hello, {name}", keys=[name]))
            unread.add(receipt.message_id)
            print(f"sent {receipt.message_id} to queue {receipt.queue.queue_id}")

    all_read = threading.Event()
    consumer = Consumer(nameservers, group="readers", start_at="first", concurrency=1)

    @consumer.on("Greetings")
    def read(message: ReceivedMessage) -> None:
        print(message.keys[0], message.body.decode())
        unread.discard(message.message_id)
        if not unread:
            all_read.set()

    with consumer:
        all_read.wait()


if __name__ == "__main__":
    main()
