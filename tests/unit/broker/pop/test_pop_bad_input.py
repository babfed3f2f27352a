"""POP with invalid requests, failing disks and unfortunate timing: no message is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.long_polling import SuspendedRequest
from penstock.broker.pop import pop_message as pop_module
from penstock.broker.pop import revive
from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint
from penstock.broker.pop.pop_reader import read_messages
from penstock.errors import DiskFull
from penstock.rpc.answers import Answer, InThread, Suspend, TickAt
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BatchAck, BatchAckMessageRequestBody
from penstock.wire.codes import RequestCode
from penstock.wire.message import encode_properties
from penstock.wire.output import encode
from penstock.wire.receipt_handle import Receipt, RetryKind
from penstock.wire.record import Record
from tests.unit.broker.broker_kit import BORN, BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pop.pop_kit import (
    REVIVE,
    PopClient,
    Popped,
    advance,
    persist,
    pop_settings,
    reopen,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        send(made, b"first")
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def send(env: BrokerFixture, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert env.send(body=text, queue_id=queue_id).code == 0
    env.store.publish()


def put(env: BrokerFixture, topic: str, queue_id: int, body: bytes, **properties: str) -> None:
    """Store a message past all checks."""
    record = Record()
    record.born_host = record.store_host = BORN
    record.fill(topic.encode(), body, encode_properties(properties))
    record.queue_id = queue_id
    queue = env.store.make_queue(topic.encode(), queue_id)
    assert queue is not None
    assert env.store.writer.check(record) == 0
    assert env.store.writer.put_in(record, queue, env.now_ms) == 0
    env.store.publish()


# --- waiting


def serve_together(env: BrokerFixture, *frames: bytes) -> None:
    """Serve requests of one connection in one loop iteration, as the server does: requests are
    suspended first, then those with new messages are woken."""
    data = b"".join(frames)
    env.request_loop.bind(memoryview(bytearray(data)), BORN)
    env.request_loop.set_client(1, "10.1.2.3:54321", BORN)
    assert env.request_loop.serve(0, len(data), env.now_ms) == len(data)
    env.request_loop.output.take()
    deferred, env.request_loop.deferred = env.request_loop.deferred, []
    for opaque, _, _, answer, _ in deferred:
        if isinstance(answer := env.finish(answer), Suspend):
            env.context.long_polling.add(1, opaque, answer)
    if env.request_loop.arrivals:
        env.request_loop.arrivals = False
        env.store.notify()


def pop_frame(env: BrokerFixture, **ext: Any) -> bytes:
    fields = {
        "consumerGroup": "G",
        "topic": "T",
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": 10_000,
        "pollTime": 15_000,
        "bornTime": env.now_ms,
        "initMode": 0,
    } | ext
    named = {name: str(value) for name, value in fields.items()}
    return encode(RequestCode.POP_MESSAGE, named, opaque=9)


def test_a_send_after_the_pop_in_one_loop_iteration_is_not_missed(
    env: BrokerFixture, client: PopClient
) -> None:
    client.ack_all(client.pop())
    serve_together(env, pop_frame(env), env.send_frame(body=b"a"))
    assert [bodies(reply) for reply in env.woken] == [[b"a"]]


def test_a_send_after_the_pull_in_one_loop_iteration_is_not_missed(env: BrokerFixture) -> None:
    ext = {
        "consumerGroup": "G",
        "topic": "T",
        "queueId": "0",
        "queueOffset": "1",
        "maxMsgNums": "32",
        "sysFlag": "6",
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": "*",
        "subVersion": "0",
    }
    pull = encode(RequestCode.PULL_MESSAGE, ext, opaque=9)
    serve_together(env, pull, env.send_frame(body=b"a"))
    assert [bodies(reply) for reply in env.woken] == [[b"a"]]


def test_a_blocked_client_does_not_delay_others(env: BrokerFixture, client: PopClient) -> None:
    client.ack_all(client.pop())
    client.suspend()
    client.suspend()
    stuck: list[SuspendedRequest] = []
    wake = env.wake

    def wake_second(suspended: SuspendedRequest, last: bool) -> None:
        if stuck:
            wake(suspended, last)
        else:
            stuck.append(suspended)
            env.context.long_polling.pass_on(suspended)

    env.context.long_polling.on_wake(wake_second)
    send(env, b"a")
    assert [bodies(reply) for reply in env.woken] == [[b"a"]]


def begin(client: PopClient, **ext: Any) -> InThread:
    """Run a pop up to its read in the thread pool."""
    env, taken = client.env, list[Answer]()
    finish = env.finish
    env.finish = taken.append  # type: ignore[method-assign, assignment]
    try:
        client.ask(**ext)
    finally:
        env.finish = finish  # type: ignore[method-assign]
    (job,) = taken
    assert isinstance(job, InThread)
    return job


def test_a_pop_of_one_queue_is_woken_after_a_read_of_retries(
    env: BrokerFixture, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(env, b"second")
    assert len(client.pop(invisibleTime=1_000)) == 2
    advance(env, 2_000)  # both are in queue 0 of the retry topic

    def cold(*arguments: Any, wait: bool, **named: Any) -> Any:
        return read_messages(*arguments, wait=True, **named) if wait else None

    with monkeypatch.context() as patch:
        patch.setattr(pop_module, "read_messages", cold)
        job = begin(client, queueId=0, maxMsgNums=1)
    client.suspend(queueId=3)
    assert bodies(job.then(job.work())) == [b"first"]
    assert [bodies(reply) for reply in env.woken] == [[b"second"]]


def test_a_new_group_does_not_read_a_queue_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broker_fixture(tmp_path / "store") as env:
        for queue_id in range(4):
            send(env, b"%d" % queue_id, queue_id=queue_id)
        reads: list[int] = []

        def counted(topic: str, group: str, queue: Any, *rest: Any, **named: Any) -> Any:
            reads.append(queue.queue_id)
            return read_messages(topic, group, queue, *rest, **named)

        monkeypatch.setattr(pop_module, "read_messages", counted)
        client, found = PopClient(env), list[bytes]()
        for _ in range(4):
            found += client.bodies(initMode=1)
        assert sorted(found) == [b"0", b"1", b"2", b"3"]
        assert sorted(reads) == [0, 1, 2, 3]


# --- ordered pops


def fifo(client: PopClient, **ext: Any) -> list[Popped]:
    return client.pop(order="true", **ext)


def test_an_open_ordered_pop_survives_a_kill(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a", b"b", b"c")
    popped = fifo(PopClient(env), maxMsgNums=2)
    env = reopen(env, root, crash=True)
    try:
        client = PopClient(env)
        assert fifo(client) == []
        client.ack(popped[0])
        env = reopen(env, root, crash=True)
        client = PopClient(env)
        assert fifo(client) == []
        assert env.context.offsets.get("G", "T", 0) == 1
        client.ack(popped[1])
        assert [one.body for one in fifo(client)] == [b"c"]
    finally:
        env.close()


@pytest.mark.parametrize("persisted", [False, True])
def test_acknowledged_ordered_messages_are_not_delivered_again(
    tmp_path: Path, persisted: bool
) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a", b"b", b"c")
    client = PopClient(env)
    client.ack_all(fifo(client, maxMsgNums=2))
    if persisted:
        advance(env, 6_000)
        persist(env)
    popped = fifo(client, maxMsgNums=1)
    changed = client.change(popped[0], 30_000)
    env = reopen(env, root, crash=True)
    try:
        client = PopClient(env)
        advance(env, 29_999)
        assert fifo(client) == []
        advance(env, 1)
        assert [one.body for one in fifo(client)] == [b"c"]
        assert client.ack(changed).code == 0  # popped again since, so it is outdated
        advance(env, 10_000)
        assert [one.body for one in fifo(client)] == [b"c"]
    finally:
        env.close()


def test_a_restart_does_not_undo_a_reset_of_an_ordered_queue(tmp_path: Path) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"a", b"b", b"c")
    client = PopClient(env)
    client.ack_all(fifo(client))
    ext = {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"}
    assert env.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    advance(env, 6_000)
    persist(env)
    env = reopen(env, root, crash=True)
    try:
        assert [one.body for one in fifo(PopClient(env))] == [b"a", b"b", b"c"]
    finally:
        env.close()


def test_an_ordered_pop_that_was_not_written_blocks_nothing(
    env: BrokerFixture, client: PopClient
) -> None:
    env.store.writer.refusal = DiskFull("no room")
    assert env.frame(pop_frame(env, pollTime=0, order="true")) is not None
    env.store.writer.refusal = None
    assert [one.body for one in fifo(client)] == [b"first"]


def test_an_ack_of_an_unknown_ordered_pop_skips_nothing(
    env: BrokerFixture, client: PopClient
) -> None:
    send(env, b"second", b"third")
    popped = fifo(client)
    env.broker.pop._order.clear("T", "G", 0)  # as a lost file
    assert client.ack(popped[2]).code == 0
    assert env.context.offsets.get("G", "T", 0) == 0
    assert client.ack(popped[0]).code == 0
    assert env.context.offsets.get("G", "T", 0) == 1


def test_a_future_offset_is_not_acknowledged_in_order(
    env: BrokerFixture, client: PopClient
) -> None:
    (first,) = fifo(client)
    client.ack(first)
    env.broker.pop._order.clear("T", "G", 0)
    receipt = first.receipt._replace(start_offset=1, queue_offset=1)
    client.ack(first._replace(receipt=receipt))
    send(env, b"second")
    assert [one.body for one in fifo(client)] == [b"second"]


def test_a_shorter_invisible_time_wakes_the_server(env: BrokerFixture, client: PopClient) -> None:
    (first,) = fifo(client, invisibleTime=60_000)
    env.broker.effects.take()
    client.change(first, 5)
    assert TickAt(env.now_ms + 5) in env.broker.effects.take()


def test_a_clock_that_is_set_back_does_not_block_a_queue(
    env: BrokerFixture, client: PopClient
) -> None:
    fifo(client)
    advance(env, 1_000)
    env.now_ms -= 24 * 3600 * 1000
    advance(env, 11_000)
    assert [one.body for one in fifo(client)] == [b"first"]


# --- acks


def test_a_batch_ack_is_limited_to_the_size_of_a_pop(env: BrokerFixture, client: PopClient) -> None:
    popped = client.pop()[0].receipt
    ack = BatchAck(
        consumer_group="G",
        topic="T",
        retry="0",
        queue_id=0,
        start_offset=popped.start_offset,
        revive_queue_id=popped.revive_queue_id,
        pop_time=popped.pop_ms,
        invisible_time=popped.invisible_ms,
        bit_set=b"\xff" * 4_096,
    )
    body = fastjson.encode(BatchAckMessageRequestBody(broker_name="broker-a", acks=[ack] * 1_000))
    assert env.ask(RequestCode.BATCH_ACK_MESSAGE, {}, body).code != 0
    advance(env, 10_000)
    env.store.publish()
    assert client.bodies() == [b"first"]


def test_a_failed_change_keeps_the_old_receipt_handle(
    env: BrokerFixture, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = client.pop()

    def refuse(*_: Any) -> None:
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(env.broker.pop.revive_log, "ack", refuse)
        assert client.ask_change(first, 20_000).code != 0
    assert client.ack(first).code == 0
    advance(env, 60_000)
    env.store.publish()
    assert client.pop() == []


def test_changes_are_refused_when_too_many_checkpoints_are_open(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pop_batches_max=2)) as env:
        send(env, *(b"%d" % number for number in range(6)))
        client = PopClient(env)
        popped = client.pop()
        for one in popped[:3]:
            client.change(one, 20_000)
        assert client.ask_change(popped[3], 20_000).code != 0
        client.ack_all(popped[3:5])
        client.change(popped[5], 20_000)  # the last of its batch: there are no more than before


# --- revive


def test_a_revived_message_without_ack_is_flushed_before_offsets(
    env: BrokerFixture, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.pop()
    synced: list[int] = []
    monkeypatch.setattr(env.store, "sync_log", synced.append)

    def refuse(*_: Any) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(env.broker.pop.revive_log, "ack", refuse)
    advance(env, 10_000)
    env.context.persistence.save(env.context.offsets.table)()
    assert synced[-1] == env.store.log.end


def test_an_unreadable_checkpoint_does_not_block_others(
    env: BrokerFixture, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.pop()
    env.tick(1)
    send(env, b"second", queue_id=1)
    client.pop()
    whole = revive._read

    def fail(checkpoint: PopCheckpoint, *rest: Any) -> Any:
        if checkpoint.key.queue_id == 0:
            raise OSError("bad sector")
        return whole(checkpoint, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(revive, "_read", fail)
        advance(env, 10_500)
        env.store.publish()
        assert client.bodies() == [b"second"]
    advance(env, 2_000)
    env.store.publish()
    assert client.bodies() == [b"first"]


def test_an_invalid_group_name_does_not_stop_revive(env: BrokerFixture, client: PopClient) -> None:
    revive_log = env.broker.pop.revive_log
    group = "G" * 250
    env.context.groups.table.put(env.context.groups.find("G", 0), 0)
    checkpoint = PopCheckpoint(CheckpointKey("T", group, 0, 0, env.now_ms), 1_000, [0], 0)
    revive_log.add_checkpoint(checkpoint, env.now_ms)
    client.pop()
    advance(env, 20_000)
    env.store.publish()
    assert client.bodies() == [b"first"]
    assert not checkpoint.open


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"n":127,"so":9223372036854775807,"t":"T","c":"G","q":0,"pt":1}',
        b'{"n":2,"d":[-5,2147483647],"so":0,"t":"T","c":"G","q":-3,"pt":-9223372036854775808}',
        b'{"n":1,"d":[0],"so":9223372036854775807,"t":"T","c":"G","q":0,"pt":9223372036854775807}',
        b'{"n":1,"d":[0,0,0],"so":0,"t":"T","c":"","q":0,"pt":5,"bm":-1}',
        b'{"n":1,"d":[0,0,0],"so":0,"t":"T","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[-5],"so":2,"t":"T","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"\\ud800","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"' + b"t" * 3_000 + b'","c":"G","q":0,"pt":5}',
        b'{"n":1,"d":[0],"so":0,"t":"T/../../x","c":"G/..","q":0,"pt":5}',
    ],
)
@pytest.mark.parametrize("tag", ["ck", "ack", "bAck", "order"])
def test_invalid_entries_of_the_revive_log_are_skipped(
    tmp_path: Path, body: bytes, tag: str
) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    send(env, b"first")
    client = PopClient(env)
    client.pop()
    put(env, REVIVE, 0, body, TAGS=tag, TIMER_OUT_MS="1", POP_NEXT="9" * 30)
    put(env, REVIVE, 0, body, TAGS=tag, POP_NEXT="\u0663")
    advance(env, 20_000)
    env.store.publish()
    assert client.bodies() == [b"first"]
    env = reopen(env, root, crash=True)
    try:
        advance(env, 20_000)
        env.store.publish()
        assert b"first" in PopClient(env).bodies()
    finally:
        env.close()


def test_an_early_ack_is_not_applied_to_a_checkpoint_of_this_broker(env: BrokerFixture) -> None:
    checkpoints = env.broker.pop.revive_log.checkpoints
    key = CheckpointKey("T", "G", 0, 0, env.now_ms)
    checkpoints.ack_early(key, [0])
    put(
        env,
        REVIVE,
        0,
        fastjson.encode({"n": 1, "d": [0], "so": 0, "t": "T", "c": "G", "q": 0, "pt": key.pop_ms}),
        TAGS="ck",
    )
    revive_log = env.broker.pop.revive_log
    revive_log._read_to[0] = 0
    for entry in revive_log._entries(0, 1):
        revive_log._apply(entry, 0, env.now_ms)
    assert checkpoints.get(key) is not None


def test_a_receipt_handle_of_another_kind_is_rejected(
    env: BrokerFixture, client: PopClient
) -> None:
    (first,) = client.pop()
    for receipt in (
        first.receipt._replace(start_offset=2**63 - 1),
        first.receipt._replace(pop_ms=0),
        first.receipt._replace(pop_ms=2**63 - 1, invisible_ms=2**63 - 1),
        first.receipt._replace(revive_queue_id=2**31 - 1, pop_ms=1),
        Receipt(0, first.receipt.pop_ms, 0, 999, RetryKind.NORMAL, "broker-a", 0, 0),
    ):
        client.ack(first._replace(receipt=receipt))
        client.ask_change(first._replace(receipt=receipt), 0)
    assert len(env.broker.pop.revive_log.checkpoints) == 1
    advance(env, 10_000)
    env.store.publish()
    assert client.bodies() == [b"first"]
