"""POP under hostile requests, disks and moments: nothing is lost, nobody is forgotten."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.long_polling import SuspendedRequest
from penstock.broker.pop import pop_message as pop_module
from penstock.broker.pop import revive
from penstock.broker.pop.checkpoints import Key, Loan
from penstock.broker.pop.pop_reader import read
from penstock.errors import DiskFull
from penstock.rpc.answers import Answer, InThread, Suspend, TickAt
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BatchAck, BatchAckMessageRequestBody
from penstock.wire.codes import RequestCode
from penstock.wire.message import encode_properties
from penstock.wire.output import encode
from penstock.wire.receipt_handle import Receipt, RetryKind
from penstock.wire.record import Record
from tests.unit.broker.broker_kit import BORN, House, bodies, house
from tests.unit.broker.pop.pop_kit import (
    REVIVE,
    Popped,
    Popper,
    let_pass,
    persist,
    pop_settings,
    reopen,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        send(made, b"first")
        yield made


@pytest.fixture
def popper(home: House) -> Popper:
    return Popper(home)


def send(home: House, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert home.send(body=text, queue_id=queue_id).code == 0
    home.store.settle()


def put(home: House, topic: str, queue_id: int, body: bytes, **properties: str) -> None:
    """Store a message past all checks."""
    record = Record()
    record.born_host = record.store_host = BORN
    record.fill(topic.encode(), body, encode_properties(properties))
    record.queue_id = queue_id
    queue = home.store.make_queue(topic.encode(), queue_id)
    assert queue is not None
    assert home.store.path.check(record) == 0
    assert home.store.path.put_in(record, queue, home.now_ms) == 0
    home.store.settle()


# --- waiting


def serve_together(home: House, *frames: bytes) -> None:
    """Several requests of one connection in one turn, as the server does it: what is to wait is
    held first, then those are woken for whom something came."""
    data = b"".join(frames)
    home.request_loop.bind(memoryview(bytearray(data)), BORN)
    home.request_loop.set_client(1, "10.1.2.3:54321", BORN)
    assert home.request_loop.serve(0, len(data), home.now_ms) == len(data)
    home.request_loop.output.take()
    deferred, home.request_loop.deferred = home.request_loop.deferred, []
    for opaque, _, _, answer in deferred:
        if isinstance(answer := home.finish(answer), Suspend):
            home.context.long_polling.add(1, opaque, answer)
    if home.request_loop.arrivals:
        home.request_loop.arrivals = False
        home.store.attend()


def pop_frame(home: House, **ext: Any) -> bytes:
    fields = {
        "consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 32,
        "invisibleTime": 10_000, "pollTime": 15_000, "bornTime": home.now_ms, "initMode": 0,
    } | ext  # fmt: skip
    named = {name: str(value) for name, value in fields.items()}
    return encode(RequestCode.POP_MESSAGE, named, opaque=9)


def test_a_send_behind_the_pop_in_one_turn_is_not_missed(home: House, popper: Popper) -> None:
    popper.ack_all(popper.pop())
    serve_together(home, pop_frame(home), home.send_frame(body=b"a"))
    assert [bodies(reply) for reply in home.woken] == [[b"a"]]


def test_a_send_behind_the_pull_in_one_turn_is_not_missed(home: House) -> None:
    ext = {
        "consumerGroup": "G", "topic": "T", "queueId": "0", "queueOffset": "1", "maxMsgNums": "32",
        "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": "15000", "subscription": "*",
        "subVersion": "0",
    }  # fmt: skip
    pull = encode(RequestCode.PULL_MESSAGE, ext, opaque=9)
    serve_together(home, pull, home.send_frame(body=b"a"))
    assert [bodies(reply) for reply in home.woken] == [[b"a"]]


def test_a_client_that_takes_no_answers_does_not_keep_others_waiting(
    home: House, popper: Popper
) -> None:
    popper.ack_all(popper.pop())
    popper.hold()
    popper.hold()
    stuck: list[SuspendedRequest] = []
    wake = home.wake

    def wake_second(held: SuspendedRequest, last: bool) -> None:
        if stuck:
            wake(held, last)
        else:
            stuck.append(held)
            home.context.long_polling.pass_on(held)

    home.context.long_polling.on_wake(wake_second)
    send(home, b"a")
    assert [bodies(reply) for reply in home.woken] == [[b"a"]]


def begin(popper: Popper, **ext: Any) -> InThread:
    """A pop up to where the pool is asked."""
    home, taken = popper.home, list[Answer]()
    finish = home.finish
    home.finish = taken.append  # type: ignore[method-assign, assignment]
    try:
        popper.ask(**ext)
    finally:
        home.finish = finish  # type: ignore[method-assign]
    (job,) = taken
    assert isinstance(job, InThread)
    return job


def test_whoever_waits_for_one_queue_hears_of_retries_that_were_read(
    home: House, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(home, b"second")
    assert len(popper.pop(invisibleTime=1_000)) == 2
    let_pass(home, 2_000)  # both are in queue 0 of the retry topic

    def cold(*arguments: Any, wait: bool, **named: Any) -> Any:
        return read(*arguments, wait=True, **named) if wait else None

    with monkeypatch.context() as patch:
        patch.setattr(pop_module, "read", cold)
        job = begin(popper, queueId=0, maxMsgNums=1)
    popper.hold(queueId=3)
    assert bodies(job.then(job.work())) == [b"first"]
    assert [bodies(reply) for reply in home.woken] == [[b"second"]]


def test_a_group_that_begins_does_not_read_a_queue_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house(tmp_path / "store") as home:
        for queue_id in range(4):
            send(home, b"%d" % queue_id, queue_id=queue_id)
        reads: list[int] = []

        def counted(topic: str, queue: Any, *rest: Any, **named: Any) -> Any:
            reads.append(queue.queue_id)
            return read(topic, queue, *rest, **named)

        monkeypatch.setattr(pop_module, "read", counted)
        popper, found = Popper(home), list[bytes]()
        for _ in range(4):
            found += popper.bodies(initMode=1)
        assert sorted(found) == [b"0", b"1", b"2", b"3"]
        assert sorted(reads) == [0, 1, 2, 3]


# --- pops in order


def fifo(popper: Popper, **ext: Any) -> list[Popped]:
    return popper.pop(order="true", **ext)


def test_an_open_pop_in_order_survives_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a", b"b", b"c")
    popped = fifo(Popper(home), maxMsgNums=2)
    home = reopen(home, root, crash=True)
    try:
        popper = Popper(home)
        assert fifo(popper) == []
        popper.ack(popped[0])
        home = reopen(home, root, crash=True)
        popper = Popper(home)
        assert fifo(popper) == []
        assert home.context.offsets.get("G", "T", 0) == 1
        popper.ack(popped[1])
        assert [one.body for one in fifo(popper)] == [b"c"]
    finally:
        home.close()


@pytest.mark.parametrize("persisted", [False, True])
def test_what_was_acknowledged_in_order_never_comes_again(tmp_path: Path, persisted: bool) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a", b"b", b"c")
    popper = Popper(home)
    popper.ack_all(fifo(popper, maxMsgNums=2))
    if persisted:
        let_pass(home, 6_000)
        persist(home)
    popped = fifo(popper, maxMsgNums=1)
    changed = popper.change(popped[0], 30_000)
    home = reopen(home, root, crash=True)
    try:
        popper = Popper(home)
        let_pass(home, 29_999)
        assert fifo(popper) == []
        let_pass(home, 1)
        assert [one.body for one in fifo(popper)] == [b"c"]
        assert popper.ack(changed).code == 0  # popped again since: it counts no more
        let_pass(home, 10_000)
        assert [one.body for one in fifo(popper)] == [b"c"]
    finally:
        home.close()


def test_a_restart_in_order_does_not_undo_a_reset(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a", b"b", b"c")
    popper = Popper(home)
    popper.ack_all(fifo(popper))
    ext = {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"}
    assert home.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    let_pass(home, 6_000)
    persist(home)
    home = reopen(home, root, crash=True)
    try:
        assert [one.body for one in fifo(Popper(home))] == [b"a", b"b", b"c"]
    finally:
        home.close()


def test_a_pop_in_order_that_is_not_noted_blocks_nothing(home: House, popper: Popper) -> None:
    home.store.path.refusal = DiskFull("no room")
    assert home.frame(pop_frame(home, pollTime=0, order="true")) is not None
    home.store.path.refusal = None
    assert [one.body for one in fifo(popper)] == [b"first"]


def test_acknowledging_an_unknown_pop_passes_over_nothing(home: House, popper: Popper) -> None:
    send(home, b"second", b"third")
    popped = fifo(popper)
    home.broker.pop._order.clear("T", "G", 0)  # as a file that was lost
    assert popper.ack(popped[2]).code == 0
    assert home.context.offsets.get("G", "T", 0) == 0
    assert popper.ack(popped[0]).code == 0
    assert home.context.offsets.get("G", "T", 0) == 1


def test_a_message_that_does_not_exist_yet_is_not_acknowledged_in_order(
    home: House, popper: Popper
) -> None:
    (first,) = fifo(popper)
    popper.ack(first)
    home.broker.pop._order.clear("T", "G", 0)
    receipt = first.receipt._replace(start_offset=1, queue_offset=1)
    popper.ack(first._replace(receipt=receipt))
    send(home, b"second")
    assert [one.body for one in fifo(popper)] == [b"second"]


def test_the_server_wakes_for_a_time_that_became_shorter(home: House, popper: Popper) -> None:
    (first,) = fifo(popper, invisibleTime=60_000)
    home.broker.effects.take()
    popper.change(first, 5)
    assert TickAt(home.now_ms + 5) in home.broker.effects.take()


def test_a_clock_set_back_does_not_block_a_queue(home: House, popper: Popper) -> None:
    fifo(popper)
    let_pass(home, 1_000)
    home.now_ms -= 24 * 3600 * 1000
    let_pass(home, 11_000)
    assert [one.body for one in fifo(popper)] == [b"first"]


# --- acknowledgements


def test_a_batch_acknowledges_no_more_than_a_pop_lends(home: House, popper: Popper) -> None:
    popped = popper.pop()[0].receipt
    ack = BatchAck(
        consumer_group="G", topic="T", retry="0", queue_id=0, start_offset=popped.start_offset,
        revive_queue_id=popped.revive_queue_id, pop_time=popped.pop_ms,
        invisible_time=popped.invisible_ms, bit_set=b"\xff" * 4_096,
    )  # fmt: skip
    body = fastjson.encode(BatchAckMessageRequestBody(broker_name="broker-a", acks=[ack] * 1_000))
    assert home.ask(RequestCode.BATCH_ACK_MESSAGE, {}, body).code != 0
    let_pass(home, 10_000)
    home.store.settle()
    assert popper.bodies() == [b"first"]


def test_a_change_that_fails_half_way_leaves_the_old_receipt(
    home: House, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = popper.pop()

    def refuse(*_: Any) -> None:
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(home.broker.pop.journal, "_write_acks", refuse)
        assert popper.ask_change(first, 20_000).code != 0
    assert popper.ack(first).code == 0
    let_pass(home, 60_000)
    home.store.settle()
    assert popper.pop() == []


def test_changes_are_refused_where_far_too_much_is_lent(tmp_path: Path) -> None:
    with house(tmp_path / "store", pop_settings(pop_batches_max=2)) as home:
        send(home, *(b"%d" % number for number in range(6)))
        popper = Popper(home)
        popped = popper.pop()
        for one in popped[:3]:
            popper.change(one, 20_000)
        assert popper.ask_change(popped[3], 20_000).code != 0
        popper.ack_all(popped[3:5])
        popper.change(popped[5], 20_000)  # the last of its batch: there are no more than before


# --- what comes back


def test_a_copy_that_was_not_noted_is_on_the_disk_before_offsets(
    home: House, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    popper.pop()
    synced: list[int] = []
    monkeypatch.setattr(home.store, "sync_log", synced.append)

    def refuse(*_: Any) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(home.broker.pop.journal, "_write_acks", refuse)
    let_pass(home, 10_000)
    home.context.persistence.save(home.context.offsets.table)()
    assert synced[-1] == home.store.log.end


def test_what_cannot_be_read_keeps_nobody_back(
    home: House, popper: Popper, monkeypatch: pytest.MonkeyPatch
) -> None:
    popper.pop()
    home.tick(1)
    send(home, b"second", queue_id=1)
    popper.pop()
    whole = revive._read

    def fail(loan: Loan, *rest: Any) -> Any:
        if loan.key.queue_id == 0:
            raise OSError("bad sector")
        return whole(loan, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(revive, "_read", fail)
        let_pass(home, 10_500)
        home.store.settle()
        assert popper.bodies() == [b"second"]
    let_pass(home, 2_000)
    home.store.settle()
    assert popper.bodies() == [b"first"]


def test_a_group_of_an_impossible_name_stops_nothing(home: House, popper: Popper) -> None:
    journal = home.broker.pop.journal
    group = "G" * 250
    home.context.groups.table.put(home.context.groups.find("G", 0), 0)
    loan = Loan(Key("T", group, 0, 0, home.now_ms), 1_000, [0], 0)
    journal.lend(loan, home.now_ms)
    popper.pop()
    let_pass(home, 20_000)
    home.store.settle()
    assert popper.bodies() == [b"first"]
    assert not loan.open


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'{"n":127,"so":9223372036854775807,"t":"T","c":"G","q":0,"pt":1}',
        b'{"n":2,"d":[-5,2147483647],"so":0,"t":"T","c":"G","q":-3,"pt":-9223372036854775808}',
        b'{"n":1,"d":[0],"so":9223372036854775807,"t":"T","c":"G","q":0,"pt":9223372036854775807}',
        b'{"n":1,"d":[0,0,0],"so":0,"t":"T","c":"","q":0,"pt":5,"bm":-1}',
        b'{"n":1,"d":[0,0,0],"so":0,"t":"T","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[-5],"so":2,"t":"T","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"\\ud800","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"' + b"t" * 3_000 + b'","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"T/../../x","c":"G/..","q":0,"pt":5}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("tag", ["ck", "ack", "bAck", "order"])
def test_entries_that_make_no_sense_stop_nothing(tmp_path: Path, body: bytes, tag: str) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"first")
    popper = Popper(home)
    popper.pop()
    put(home, REVIVE, 0, body, TAGS=tag, TIMER_OUT_MS="1", POP_NEXT="9" * 30)
    put(home, REVIVE, 0, body, TAGS=tag, POP_NEXT="\u0663")
    let_pass(home, 20_000)
    home.store.settle()
    assert popper.bodies() == [b"first"]
    home = reopen(home, root, crash=True)
    try:
        let_pass(home, 20_000)
        home.store.settle()
        assert b"first" in Popper(home).bodies()
    finally:
        home.close()


def test_an_early_acknowledgement_does_not_count_for_a_batch_of_ours(home: House) -> None:
    loans = home.broker.pop.journal.loans
    key = Key("T", "G", 0, 0, home.now_ms)
    loans.ack_early(key, [0])
    put(
        home, REVIVE, 0,
        fastjson.encode({"n": 1, "d": [0], "so": 0, "t": "T", "c": "G", "q": 0, "pt": key.pop_ms}),
        TAGS="ck",
    )  # fmt: skip
    journal = home.broker.pop.journal
    journal._read_to[0] = 0
    for entry in journal._entries(0, 1):
        journal._apply(entry, 0, home.now_ms)
    assert loans.get(key) is not None


def test_a_receipt_of_another_kind_is_no_use(home: House, popper: Popper) -> None:
    (first,) = popper.pop()
    for receipt in (
        first.receipt._replace(start_offset=2**63 - 1),
        first.receipt._replace(pop_ms=0),
        first.receipt._replace(pop_ms=2**63 - 1, invisible_ms=2**63 - 1),
        first.receipt._replace(revive_queue_id=2**31 - 1, pop_ms=1),
        Receipt(0, first.receipt.pop_ms, 0, 999, RetryKind.NORMAL, "broker-a", 0, 0),
    ):
        popper.ack(first._replace(receipt=receipt))
        popper.ask_change(first._replace(receipt=receipt), 0)
    assert len(home.broker.pop.journal.loans) == 1
    let_pass(home, 10_000)
    home.store.settle()
    assert popper.bodies() == [b"first"]
