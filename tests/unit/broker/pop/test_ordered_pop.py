"""Pops in order: one open pop per queue and group."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.pop.ordered_pop import NEVER, NOT_IN_FLIGHT, OUTDATED, GroupQueue, OrderedPops
from penstock.errors import StoreDamaged
from penstock.store.tables.config_tables import ConfigFile

T, G, Q = "T", "g", 3
QUEUE = (T, G, Q)
NOW = 1_700_000_000_000

# As RocketMQ 5.4.0 writes it.
JAVA_FILE = b"""{
\t"orderedConsumptionLevel":"QUEUE",
\t"table":{
\t\t"T@g":{
\t\t\t3:{
\t\t\t\t"cm":3,
\t\t\t\t"i":30000,
\t\t\t\t"l":1700000000002,
\t\t\t\t"o":[7,2,4],
\t\t\t\t"oc":{
\t\t\t\t\t7:1,
\t\t\t\t\t9:1
\t\t\t\t},
\t\t\t\t"ot":{
\t\t\t\t\t11:1700000099999
\t\t\t\t},
\t\t\t\t"popTime":1700000000001
\t\t\t}
\t\t}
\t}
}"""


class Files:
    """A disk in memory."""

    def __init__(self, content: bytes | None = None) -> None:
        self.content = {Path(OrderedPops.FILE): content} if content is not None else {}

    def read(self, path: Path) -> bytes | None:
        return self.content.get(path)

    def replace(self, path: Path, data: bytes) -> None:
        self.content[path] = data

    def rename(self, old: Path, new: Path) -> None:
        self.content[new] = self.content.pop(old)


def load(content: bytes) -> OrderedPops:
    pops = OrderedPops()
    assert pops.load(ConfigFile(Files(content), Path(OrderedPops.FILE)))
    return pops


def test_a_queue_is_blocked_until_all_is_acknowledged() -> None:
    pops = OrderedPops()
    assert not pops.check_block(None, *QUEUE, NOW)
    assert pops.update(None, *QUEUE, NOW, 30_000, [5, 6, 8]) == "0 3 0"
    assert pops.check_block(None, *QUEUE, NOW)
    assert pops.commit_and_next(*QUEUE, 6, NOW) == 5
    assert pops.commit_and_next(*QUEUE, 5, NOW) == 8
    assert pops.check_block(None, *QUEUE, NOW)
    assert pops.commit_and_next(*QUEUE, 8, NOW) == 9
    assert not pops.check_block(None, *QUEUE, NOW)
    assert pops.due() == NEVER


def test_other_queues_and_groups_are_free() -> None:
    pops = OrderedPops()
    pops.update(None, *QUEUE, NOW, 30_000, [5])
    assert not pops.check_block(None, T, G, Q + 1, NOW)
    assert not pops.check_block(None, T, "other", Q, NOW)
    assert not pops.check_block(None, "U", G, Q, NOW)


def test_a_queue_is_unblocked_when_its_messages_are_visible_again() -> None:
    pops = OrderedPops()
    pops.update(None, *QUEUE, NOW, 30_000, [5, 6])
    assert pops.due() == NOW + 30_000
    assert pops.check_block(None, *QUEUE, NOW + 29_999)
    assert pops.take_unblocked(NOW + 29_999) == []
    assert not pops.check_block(None, *QUEUE, NOW + 30_000)
    assert pops.take_unblocked(NOW + 30_000) == [GroupQueue(*QUEUE)]
    assert pops.take_unblocked(NOW + 40_000) == []


def test_the_same_attempt_may_pop_again() -> None:
    pops = OrderedPops()
    pops.update("try", *QUEUE, NOW, 30_000, [5])
    assert not pops.check_block("try", *QUEUE, NOW)
    assert pops.check_block("other", *QUEUE, NOW)
    assert pops.check_block(None, *QUEUE, NOW)
    # The response was lost, so no client has received the message yet.
    assert pops.update("try", *QUEUE, NOW + 1, 30_000, [5]) == "0 3 0"
    assert pops.update("other", *QUEUE, NOW + 2, 30_000, [5]) == "0 qo3%5 1;0 3 1"
    assert pops.update("other", *QUEUE, NOW + 3, 30_000, [5, 6]) == "0 qo3%5 1;0 3 0"


def test_messages_that_are_popped_again_are_counted() -> None:
    pops = OrderedPops()
    pops.update("att", *QUEUE, NOW, 30_000, [5, 7, 9])
    # As Java counts: a queue with a new message was never popped as a whole.
    assert pops.update(None, *QUEUE, NOW + 1, 30_000, [7, 9, 11]) == "0 qo3%7 1;0 qo3%9 1;0 3 0"
    assert pops.update(None, *QUEUE, NOW + 2, 30_000, [9, 11]) == "0 qo3%9 2;0 qo3%11 1;0 3 1"
    for offset in (9, 11):
        pops.commit_and_next(*QUEUE, offset, NOW + 2)
    assert pops.update(None, *QUEUE, NOW + 3, 30_000, [12]) == "0 3 0"


def test_acks_outside_of_the_open_pop_are_rejected() -> None:
    pops = OrderedPops()
    assert pops.commit_and_next(*QUEUE, 9, NOW) == 10, "nothing is known: the client is trusted"
    pops.update(None, *QUEUE, NOW, 30_000, [5, 6])
    assert pops.commit_and_next(*QUEUE, 5, NOW - 1) == OUTDATED
    assert pops.commit_and_next(*QUEUE, 7, NOW) == NOT_IN_FLIGHT
    assert pops.commit_and_next(*QUEUE, 5, NOW) == 6
    assert pops.commit_and_next(*QUEUE, 5, NOW) == 6, "twice is once"


def test_a_message_may_be_visible_earlier_or_later() -> None:
    pops = OrderedPops()
    pops.update(None, *QUEUE, NOW, 30_000, [5, 6])
    assert pops.update_next_visible(*QUEUE, 5, NOW, NOW + 60_000)
    assert pops.due() == NOW + 60_000
    assert pops.check_block(None, *QUEUE, NOW + 30_000)
    assert pops.update_next_visible(*QUEUE, 5, NOW, NOW + 1_000)
    assert pops.due() == NOW + 30_000, "the other message still waits"
    pops.commit_and_next(*QUEUE, 6, NOW)
    assert pops.due() == NOW + 1_000
    assert not pops.update_next_visible(*QUEUE, 7, NOW, NOW)
    assert not pops.update_next_visible(*QUEUE, 5, NOW - 1, NOW)
    assert not pops.update_next_visible("U", G, Q, 5, NOW, NOW)


def test_an_offset_reset_unblocks_the_queue() -> None:
    pops = OrderedPops()
    pops.update(None, *QUEUE, NOW, 30_000, [5])
    pops.clear(*QUEUE)
    assert not pops.check_block(None, *QUEUE, NOW)
    assert pops.due() == NEVER
    assert pops.take_unblocked(NOW + 99_999) == []


def test_deleted_and_idle_queues_are_removed() -> None:
    pops = OrderedPops()
    day = 24 * 3600 * 1000
    pops.update(None, T, G, 0, NOW, 1_000, [1])
    pops.update(None, T, G, 1, NOW, 2 * day, [1])
    pops.update(None, T, G, 8, NOW, 1_000, [1])
    pops.update(None, T, "gone", 0, NOW, 1_000, [1])
    pops.update(None, "gone", G, 0, NOW, 1_000, [1])
    pops.dirty = False
    read_queues = {T: 8}
    pops.clean(NOW, lambda topic: read_queues.get(topic, 0), lambda group: group == G)
    assert len(pops) == 2
    assert pops.dirty
    pops.clean(NOW + day + 1, lambda topic: 8, lambda group: True)
    assert len(pops) == 1, "a queue that is blocked stays so"
    assert pops.check_block(None, T, G, 1, NOW + day)


def test_a_file_of_java_is_loaded() -> None:
    pops = load(JAVA_FILE)
    popped = NOW + 1
    assert pops.due() == 1_700_000_099_999
    assert pops.commit_and_next(*QUEUE, 7, popped) == 11
    assert pops.update(None, *QUEUE, NOW + 2, 1, [7, 9]) == "0 qo3%7 2;0 qo3%9 2;0 3 2"


def test_a_saved_file_is_loaded() -> None:
    pops = OrderedPops()
    pops.update("try", *QUEUE, NOW, 30_000, [5, 6, 9])
    pops.update(None, T, G, 0, NOW, 10_000, list(range(64)))
    pops.commit_and_next(T, G, 0, 63, NOW)
    pops.commit_and_next(*QUEUE, 5, NOW)
    pops.update_next_visible(*QUEUE, 6, NOW, NOW + 90_000)
    assert pops.dirty
    text = pops.snapshot()
    assert not pops.dirty
    again = load(text)
    assert again.snapshot() == text
    assert not again.dirty
    assert not again.check_block("try", *QUEUE, NOW)
    assert again.check_block(None, *QUEUE, NOW + 80_000)
    assert again.commit_and_next(*QUEUE, 6, NOW) == 9


def test_files_of_older_brokers_are_loaded() -> None:
    old = load(b'{"table":{"T@g":{3:{"popTime":1000,"o":[5]},4:{"o":[]},5:{}}}}')
    assert len(old) == 1
    assert old.due() == 61_000
    assert not OrderedPops().load(ConfigFile(Files(), Path(OrderedPops.FILE)))
    with pytest.raises(StoreDamaged):
        load(b'{"table":[]}')


class Ordered(RuleBasedStateMachine):
    """A group that pops two queues in order, against a simple model of visible messages."""

    def __init__(self) -> None:
        super().__init__()
        self.pops = OrderedPops()
        self.now = NOW
        self.open: dict[int, dict[int, int]] = {}  # queue → open offset → visible
        self.popped: dict[int, int] = {}
        self.progress = {0: 0, 1: 0}

    @rule(ms=st.integers(1, 20_000))
    def wait(self, ms: int) -> None:
        self.now += ms
        for queue in self.pops.take_unblocked(self.now):
            assert not self.blocked(queue.queue_id)

    def blocked(self, queue_id: int) -> bool:
        return any(self.now < visible for visible in self.open.get(queue_id, {}).values())

    @rule(queue_id=st.integers(0, 1), count=st.integers(1, 32), invisible=st.integers(1, 30_000))
    def pop(self, queue_id: int, count: int, invisible: int) -> None:
        self.now += 1  # no two pops in one millisecond: their receipts would be the same
        assert self.pops.check_block(None, T, G, queue_id, self.now) == self.blocked(queue_id)
        if not self.blocked(queue_id):
            first = self.progress[queue_id]
            offsets = list(range(first, first + count))
            self.pops.update(None, T, G, queue_id, self.now, invisible, offsets)
            self.open[queue_id] = dict.fromkeys(offsets, self.now + invisible)
            self.popped[queue_id] = self.now

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        queue_id = data.draw(st.sampled_from([queue for queue, open in self.open.items() if open]))
        offset = data.draw(st.sampled_from(sorted(self.open[queue_id])))
        last = max(self.open[queue_id])
        del self.open[queue_id][offset]
        after = self.pops.commit_and_next(T, G, queue_id, offset, self.popped[queue_id])
        assert after >= self.progress[queue_id], "progress never goes back"
        assert not self.open[queue_id] or after == min(self.open[queue_id])
        assert self.open[queue_id] or after > last
        self.progress[queue_id] = after

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data(), ms=st.integers(0, 30_000))
    def lend_longer(self, data: st.DataObject, ms: int) -> None:
        queue_id = data.draw(st.sampled_from([queue for queue, open in self.open.items() if open]))
        offset = data.draw(st.sampled_from(sorted(self.open[queue_id])))
        popped = self.popped[queue_id]
        assert self.pops.update_next_visible(T, G, queue_id, offset, popped, self.now + ms)
        self.open[queue_id][offset] = self.now + ms

    @rule()
    def restart(self) -> None:
        self.pops = load(self.pops.snapshot())

    @rule(queue_id=st.integers(0, 1))
    def reset(self, queue_id: int) -> None:
        self.pops.clear(T, G, queue_id)
        self.open.pop(queue_id, None)

    @invariant()
    def the_end_of_a_wait_is_known(self) -> None:
        """If a queue is blocked, the time when it is unblocked is known and not too late."""
        ends = [max(open.values()) for queue, open in self.open.items() if self.blocked(queue)]
        if ends:
            assert self.pops.due() <= min(ends)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.pops) <= 2
        assert len(self.pops._unblock_heap) <= 2 * 2 + 64


Ordered.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_a_group_pops_in_order = Ordered.TestCase
