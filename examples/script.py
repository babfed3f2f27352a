"""A plain script: sends a few messages and consumes them.

python examples/script.py [NAMESERVERS]    default: NAMESRV_ADDR, else 127.0.0.1:9876
"""

import sys

from penstock import Consumer, Message, Producer


def main() -> None:
    nameservers = sys.argv[1] if len(sys.argv) > 1 else None
    with Producer(nameservers, group="greeters") as producer:
        for name in ("Ada", "Grace", "Barbara"):
            receipt = producer.send(Message("Greetings", f"hello, {name}", keys=[name]))
            print(f"sent {receipt.message_id} to queue {receipt.queue.queue_id}")

    with Consumer(nameservers, group="readers", start_at="first") as consumer:
        consumer.subscribe("Greetings")
        for number, message in enumerate(consumer, 1):
            print(message.keys[0], message.body.decode())
            if number == 3:
                break


if __name__ == "__main__":
    main()
