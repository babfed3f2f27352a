"""Priority messages of the Python client on our broker."""

import pytest

from penstock import Admin, Message, PopConsumer, Producer, TransactionProducer
from penstock.errors import MessageIllegal
from penstock.testing import InProcessBroker


def test_pop_receives_messages_in_the_order_of_their_priority() -> None:
    with InProcessBroker() as broker:
        address = broker.address
        with Admin(address) as admin:
            admin.create_topic("Jobs", queues=4, attributes={"message.type": "PRIORITY"})
        with Producer(address) as producer:
            for priority in (1, 3, 0, 9, 2):
                receipt = producer.send(Message("Jobs", str(priority), priority=priority))
                assert receipt.queue.queue_id == min(priority, 3)
        with PopConsumer(address, group="workers", start_at="first") as consumer:
            consumer.subscribe("Jobs")
            bodies = []
            while len(bodies) < 5:
                for message in consumer.receive(count_max=1, wait_ms=1_000):
                    bodies.append(message.body.decode())
                    consumer.ack(message)
        assert bodies == ["3", "9", "2", "1", "0"]


def test_priority_is_refused_where_brokers_ignore_it() -> None:
    message = Message("Jobs", b"x", priority=1)
    with InProcessBroker() as broker:
        with Producer(broker.address) as producer:
            with pytest.raises(MessageIllegal, match="ordering key"):
                producer.send(message, ordering_key="k")
            with pytest.raises(MessageIllegal, match="in a batch"):
                producer.send_batch([message, message])
        with (
            TransactionProducer(broker.address, group="g") as transactions,
            pytest.raises(MessageIllegal, match="transactional"),
        ):
            transactions.prepare(message)
