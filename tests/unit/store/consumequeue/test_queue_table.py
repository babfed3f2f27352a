"""All queues of a store by name, while they are added and removed."""

from pathlib import Path
from random import Random

import pytest

from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.store.disk import Disk

Names = dict[tuple[bytes, int], ConsumeQueue]


def made(topic: bytes, queue_id: int) -> ConsumeQueue:
    return ConsumeQueue(Disk(), Path("none"), topic, queue_id, 8)


def found(table: QueueTable, topic: bytes, queue_id: int) -> ConsumeQueue | None:
    """Find a queue as the send path does: by a name within other bytes."""
    room = memoryview(bytearray(b"<" + topic + b">"))
    return table.find(room, 1, len(topic), queue_id)


def check(table: QueueTable, model: Names, gone: Names) -> None:
    assert {id(queue) for queue in table.rows} == {id(queue) for queue in model.values()}
    assert len(table.rows) == len(model)
    assert table.topics.keys() == {topic for topic, _ in model}
    for name, queue in model.items():
        assert found(table, *name) is table.get(*name) is queue
    for name in gone.keys() - model.keys():
        assert found(table, *name) is table.get(*name) is None


@pytest.mark.parametrize("seed", range(20))
def test_queues_are_found_while_topics_are_created_and_deleted(seed: int) -> None:
    rng = Random(seed)
    table = QueueTable()
    model: Names = {}
    gone: Names = {}
    for _ in range(60):
        topic = b"topic-%d" % rng.randrange(30)
        if rng.random() < 0.6:
            for queue_id in range(rng.randrange(1, 20)):
                if (topic, queue_id) not in model:
                    model[topic, queue_id] = made(topic, queue_id)
                    table.add(model[topic, queue_id])
        else:
            mine = {name: queue for name, queue in model.items() if name[0] == topic}
            assert {id(queue) for queue in table.of(topic)} == {id(q) for q in mine.values()}
            removed = table.remove(topic, rng.randrange(1, 25))
            assert all(model[topic, queue.queue_id] is queue for queue in removed)
            for queue in removed:
                gone[topic, queue.queue_id] = model.pop((topic, queue.queue_id))
        check(table, model, gone)


def test_removing_a_queue_moves_only_the_last_row() -> None:
    table = QueueTable()
    queues = [made(b"topic-%d" % n, 0) for n in range(50)]
    for queue in queues:
        table.add(queue)
    assert table.remove(b"topic-7", 9) == [queues[7]]
    assert table.rows == [*queues[:7], queues[49], *queues[8:49]]
    assert table.remove(b"topic-48", 9) == [queues[48]]
    assert table.rows == [*queues[:7], queues[49], *queues[8:48]]


def test_a_topic_without_queues_has_none() -> None:
    table = QueueTable()
    table.add(made(b"a", 0))
    assert table.of(b"b") == table.remove(b"b", 9) == []
    assert len(table.rows) == 1
