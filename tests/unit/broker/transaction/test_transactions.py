"""Transactions: half messages are invisible until committed, and are resolved once."""

import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.config import Settings
from penstock.errors import DiskFull
from penstock.metrics import Registry
from penstock.rpc.answers import EncodedReply, InThread, Reply
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import bodies, read_reply
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    DISCARDED,
    HALF,
    INTERVAL_MS,
    OP,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Sent,
    TransactionFixture,
    transaction_fixture,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[TransactionFixture]:
    with transaction_fixture(tmp_path / "store") as made:
        yield made


def configured(*, sync_flush: bool = False, **broker: object) -> Settings:
    settings = Settings(store=small_config(sync_flush=sync_flush))
    return msgspec.structs.replace(
        settings, broker=msgspec.structs.replace(settings.broker, **broker)
    )


# --- half messages -------------------------------------------------------------------------------


def test_a_half_message_keeps_its_real_topic_and_queue(env: TransactionFixture) -> None:
    answer = env.send_half(b"x", queue_id=2, tag="vip", properties={"k": "v"})
    (half,) = env.stored(HALF)
    assert answer.ext is not None
    assert answer.ext["queueId"] == "2"
    assert answer.ext["queueOffset"] == "0"
    assert answer.ext["msgId"] == half.offset_id
    assert answer.ext["transactionId"] == half.unique_id
    assert (half.sys_flag, half.prepared_offset, half.tags) == (0, 0, "vip")
    assert half.properties == half.properties | {
        "REAL_TOPIC": "T",
        "REAL_QID": "2",
        "TRAN_MSG": "true",
        "PGROUP": "P",
        "k": "v",
        "__transactionId__": half.unique_id,
    }


def test_a_half_message_is_never_visible(env: TransactionFixture) -> None:
    env.half(b"secret")
    env.advance(200_000)
    assert env.bodies() == []
    answer = env.pull(flags=0)
    assert answer.code != 0  # type: ignore[union-attr]


def test_the_prepared_flag_is_cleared(env: TransactionFixture) -> None:
    frame = env.send_frame(properties={"TRAN_MSG": "true", "PGROUP": "P"})
    frame = frame.replace(b'"f":"0"', b'"f":"4"')
    assert env.frame(frame).code == 0  # type: ignore[union-attr]
    (half,) = env.stored(HALF)
    assert half.sys_flag == 0
    assert env.end(Sent(0, half.physical_offset, half.unique_id or "")).code == 0
    (message,) = env.stored()
    assert message.sys_flag == COMMIT


def test_transactions_can_be_refused(tmp_path: Path) -> None:
    with transaction_fixture(tmp_path / "store", configured(reject_transactions=True)) as env:
        answer = env.send_half()
        assert answer.code == 16
        assert "reject_transactions" in (answer.remark or "")
        assert env.send().code == 0


def test_a_half_message_without_a_producer_group_is_refused(env: TransactionFixture) -> None:
    answer = env.send(properties={"TRAN_MSG": "true"})
    assert answer.code == 13
    assert "PGROUP" in (answer.remark or "")


def test_the_number_of_open_half_messages_is_limited(tmp_path: Path) -> None:
    with transaction_fixture(tmp_path / "store", configured(open_transactions_max=3)) as env:
        sent = [env.half() for _ in range(3)]
        env.advance(1000)
        answer = env.send_half()
        assert answer.code == 2
        assert "open_transactions_max" in (answer.remark or "")
        env.end(sent[1], ROLLBACK)
        env.half()


def test_properties_must_leave_room_for_those_of_checks(tmp_path: Path) -> None:
    roomy = msgspec.structs.replace(small_config(sync_flush=False), segment_bytes=1 << 18)
    with transaction_fixture(tmp_path / "store", Settings(store=roomy)) as env:
        env.half(properties={"k": "v" * 32_000})
        env.connect()
        for _ in range(2):
            (check,) = env.advance(INTERVAL_MS)
            env.end(check.handle, UNKNOWN, checked=True)
        assert [len(half.properties["k"]) for half in env.stored(HALF)] == [32_000] * 2
        answer = env.send_half(properties={"k": "v" * 32_400})
        assert answer.code == 13
        assert "room" in (answer.remark or "")


def test_a_message_as_long_as_a_segment_is_committed_after_checks(env: TransactionFixture) -> None:
    length = small_config(sync_flush=False).segment_bytes - 8 - 330
    env.half(b"x" * length)
    env.connect()
    for _ in range(3):
        (check,) = env.advance(INTERVAL_MS)
        env.end(check.handle, UNKNOWN, checked=True)
    (check,) = env.advance(INTERVAL_MS)
    assert env.end(check.handle, checked=True).code == 0
    assert [len(body) for body in env.bodies()] == [length]


def test_check_properties_of_a_client_are_ignored(env: TransactionFixture) -> None:
    env.connect()
    env.half(properties={"TRANSACTION_CHECK_TIMES": "99", "TRAN_PREPARED_QUEUE_OFFSET": "0"})
    env.half(properties={"TRANSACTION_CHECK_TIMES": "99", "TRAN_PREPARED_QUEUE_OFFSET": "0"})
    env = env.restart()
    env.connect()
    checks = env.advance(TIMEOUT_MS + 1000)
    assert [check.handle.queue_offset for check in checks] == [0, 1]
    env.close()


# --- commit and rollback -------------------------------------------------------------------------


def test_a_commit_stores_the_message_then_the_op_message(env: TransactionFixture) -> None:
    env.send(body=b"first")
    sent = env.half(b"x", queue_id=1, tag="vip", properties={"KEYS": "a b"})
    env.now_ms += 500
    answer = env.end(sent)
    assert (answer.code, answer.remark) == (0, "committed")
    (half,) = env.stored(HALF)
    (message,) = env.stored(queue_id=1)
    (op,) = env.stored(OP)
    for name in ("body", "flag", "born_ms", "born_host", "store_host", "body_crc"):
        assert getattr(message, name) == getattr(half, name), name
    assert {**message.properties, "REAL_TOPIC": "T", "REAL_QID": "1"} == half.properties
    assert "REAL_TOPIC" not in message.properties
    assert message.sys_flag == COMMIT
    assert message.prepared_offset == sent.log_offset
    assert message.store_ms == half.store_ms + 500
    assert op.physical_offset == message.physical_offset + message.size
    assert (op.body, op.tags, op.queue_id, op.sys_flag) == (b"0,", "d", 0, 0)


def test_consumers_receive_a_committed_message(env: TransactionFixture) -> None:
    sent = env.half(b"x")
    env.end(sent)
    assert bodies(env.pull(flags=4)) == [b"x"]


def test_a_rollback_stores_only_the_op_message(env: TransactionFixture) -> None:
    sent = env.half()
    answer = env.end(sent, ROLLBACK)
    assert (answer.code, answer.remark) == (0, "rolled back")
    assert env.stored() == []
    assert env.ops() == [b"0,"]


def test_a_repeated_request_stores_nothing(env: TransactionFixture) -> None:
    good, bad = env.half(b"good"), env.half(b"bad")
    env.end(good)
    env.end(bad, ROLLBACK)
    end = env.store.log.end
    for _ in range(3):
        assert env.end(good).remark == "already committed"
        assert env.end(bad, ROLLBACK).remark == "already rolled back"
        env.advance(60_000)
    assert env.store.log.end == end


def test_an_outcome_can_not_be_changed(env: TransactionFixture) -> None:
    good, bad = env.half(b"good"), env.half(b"bad")
    env.end(good)
    env.end(bad, ROLLBACK)
    answer = env.end(good, ROLLBACK)
    assert answer.code == 200
    assert "already committed" in (answer.remark or "")
    answer = env.end(bad)
    assert answer.code == 201
    assert "already rolled back" in (answer.remark or "")
    assert env.bodies() == [b"good"]


def test_unknown_changes_nothing(env: TransactionFixture) -> None:
    sent = env.half()
    end = env.store.log.end
    answer = env.end(sent, UNKNOWN)
    assert answer.code == 0
    assert "unknown" in (answer.remark or "")
    assert env.store.log.end == end
    assert env.end(sent).code == 0
    assert env.end(sent, UNKNOWN).remark == "already committed"


def test_a_one_way_request_is_not_answered(env: TransactionFixture) -> None:
    sent = env.half(b"x")
    ext = {
        "producerGroup": "P",
        "tranStateTableOffset": str(sent.queue_offset),
        "commitLogOffset": str(sent.log_offset),
        "commitOrRollback": "8",
        "msgId": sent.key,
    }
    command = Command(RequestCode.END_TRANSACTION, ext, now_ms=env.now_ms, flag=2)
    assert env.finish(env.broker.handle(command)) is None
    assert env.bodies() == [b"x"]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"group": "Q"}, "producer group"),
        ({"tranStateTableOffset": "1"}, "do not match"),
        ({"tranStateTableOffset": "7"}, "do not match"),
        ({"commitLogOffset": "1"}, ""),
        ({"commitLogOffset": "999999"}, ""),
        ({"commitLogOffset": "0", "tranStateTableOffset": "9"}, "no half"),
    ],
)
def test_wrong_offsets_are_refused(
    env: TransactionFixture, changed: dict[str, str], word: str
) -> None:
    env.send(body=b"no half")
    sent, other = env.half(b"a"), env.half(b"b")
    assert other.queue_offset == 1
    fields = {name: value for name, value in changed.items() if name != "group"}
    answer = env.end(sent, group=changed.get("group", "P"), fields=fields)
    assert answer.code == 1
    assert word in (answer.remark or "")
    assert env.bodies() == [b"no half"]
    assert env.ops() == []
    assert env.end(sent).code == 0
    env.advance(1000)
    assert env.end(other).code == 0


def test_the_permission_on_its_topic_is_required(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = env.half(b"x")
    asked = []

    def check_write(command: Command, topic: str) -> Reply | None:
        asked.append(topic)
        return Reply(16)

    monkeypatch.setattr(
        type(env.context.access), "check_write", lambda _, *args: check_write(*args)
    )
    assert env.end(sent, checked=True, fields={"topic": HALF}).code == 16
    assert asked == ["T"]
    monkeypatch.undo()
    assert env.bodies() == []
    assert env.end(sent).remark == "committed"


@pytest.mark.parametrize("state", ["1", "4", "-1", "x", ""])
def test_another_state_is_refused(env: TransactionFixture, state: str) -> None:
    assert env.end(env.half(), fields={"commitOrRollback": state}).code == 29


def test_an_old_half_message_is_read_in_the_thread_pool(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = env.half(b"x")
    monkeypatch.setattr(env.transactions, "_read_now", lambda handle: None)
    assert env.end(sent).remark == "committed"
    assert env.end(sent).remark == "already committed"


def test_a_half_message_of_a_deleted_topic_is_discarded(env: TransactionFixture) -> None:
    sent = env.half(b"x")
    list(env.context.topics.delete("T", env.now_ms))
    answer = env.end(sent)
    assert answer.code == 17
    assert DISCARDED in (answer.remark or "")
    assert env.bodies(DISCARDED) == [b"x"]
    assert env.ops() == [b"0,"]
    assert env.end(sent).code == 201


def test_a_commit_to_a_smaller_topic_uses_a_readable_queue(env: TransactionFixture) -> None:
    sent = env.half(b"x", queue_id=3)
    smaller = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=6)
    env.context.topics.put(smaller, env.now_ms)
    env.end(sent)
    assert env.bodies(queue_id=1) == [b"x"]


# --- delays --------------------------------------------------------------------------------------


def test_a_delay_begins_with_the_commit(env: TransactionFixture) -> None:
    sent = env.half(b"x", properties={"DELAY": "2"}, queue_id=1)
    assert env.bodies("SCHEDULE_TOPIC_XXXX", 1) == []
    env.advance(5500)
    env.end(sent)
    (discarded,) = env.stored("SCHEDULE_TOPIC_XXXX", 1)
    assert (discarded.sys_flag, discarded.prepared_offset) == (COMMIT, sent.log_offset)
    env.advance(4999)
    assert env.bodies(queue_id=1) == []
    env.advance(1)
    (message,) = env.stored(queue_id=1)
    assert (message.body, message.sys_flag) == (b"x", COMMIT)
    assert env.end(sent).remark == "already committed"
    env = env.restart()
    assert env.end(sent).remark == "already committed"
    assert env.end(sent, ROLLBACK).code == 200
    env.close()


def test_a_delivery_time_is_kept(env: TransactionFixture) -> None:
    due_ms = env.now_ms + 10_000
    sent = env.half(b"x", properties={"TIMER_DELIVER_MS": str(due_ms)})
    env.end(sent)
    env.advance(9_000)
    assert env.bodies() == []
    env.advance(3_000)
    assert env.bodies() == [b"x"]


@pytest.mark.parametrize("properties", [{"DELAY": "x"}, {"TIMER_DELIVER_MS": "x"}])
def test_an_invalid_delay_is_refused_at_send(
    env: TransactionFixture, properties: dict[str, str]
) -> None:
    assert env.send_half(properties=properties).code != 0
    assert env.store.log.end == 0


# --- a store that refuses ------------------------------------------------------------------------


def test_a_half_message_stays_open_while_the_store_refuses(env: TransactionFixture) -> None:
    sent, other = env.half(b"x"), env.half(b"y")
    env.store.writer.refusal = DiskFull("no space")
    assert env.end(sent).code == 14
    assert env.end(other, ROLLBACK).code == 14
    env.store.writer.refusal = None
    assert env.end(sent).remark == "committed"
    assert env.end(other, ROLLBACK).code == 0
    env.advance(1000)
    assert env.bodies() == [b"x"]
    assert sorted(b",".join(env.ops()).replace(b",,", b",")) == sorted(b"0,1,")


def test_a_refused_op_message_is_written_later(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.send(body=b"first")
    queues = env.transactions._queues
    one, two, three = (env.half(body) for body in (b"1", b"2", b"3"))
    put_op = queues._put_op
    monkeypatch.setattr(queues, "_put_op", lambda body, now_ms: False)
    assert env.end(one).remark == "committed"  # the committed message is stored
    assert env.end(two, ROLLBACK).code == 14
    assert env.end(two, ROLLBACK).code == 14
    env.flush()
    env.advance(3000)
    assert env.progress(HALF) is None
    monkeypatch.setattr(queues, "_put_op", put_op)
    assert env.end(three).remark == "committed"
    assert env.ops() == [b"0,1,2,"]
    assert env.end(two, ROLLBACK).remark == "already rolled back"
    assert env.bodies() == [b"first", b"1", b"3"]


def test_many_offsets_are_split_over_op_messages(env: TransactionFixture) -> None:
    env.transactions._queues.mark_done(range(2000), env.now_ms)
    pieces = env.ops()
    assert len(pieces) == 3
    assert [int(n) for n in b"".join(pieces).split(b",")[:-1]] == list(range(2000))


# --- sync flush ----------------------------------------------------------------------------------


def test_under_sync_flush_the_response_waits_for_the_flush(tmp_path: Path) -> None:
    with transaction_fixture(tmp_path / "store", configured(sync_flush=True)) as env:
        env.send_half(b"x")
        env.flush()
        (half,) = env.stored(HALF)
        for state, remark in ((COMMIT, "committed"), (COMMIT, "already committed")):
            ext = {
                "producerGroup": "P",
                "tranStateTableOffset": "0",
                "msgId": "x",
                "commitLogOffset": str(half.physical_offset),
                "commitOrRollback": str(state),
            }
            command = Command(RequestCode.END_TRANSACTION, ext, now_ms=env.now_ms)
            answer = env.broker.handle(command)
            assert isinstance(answer, EncodedReply)
            assert answer.offset == env.store.log.end > half.physical_offset + half.size
            assert read_reply(answer.data).remark == remark
            assert read_reply(answer.late).code == 10
        assert env.bodies() == []
        env.flush()
        assert env.bodies() == [b"x"]


def test_a_half_message_that_is_not_flushed_can_be_rolled_back(tmp_path: Path) -> None:
    # Clients roll back when their send was answered FLUSH_DISK_TIMEOUT.
    with transaction_fixture(tmp_path / "store", configured(sync_flush=True)) as env:
        env.send_half(b"x")
        env.store.publish()
        entry = env.store.make_queue(HALF.encode(), 0).entry(0)  # type: ignore[union-attr]
        assert entry is not None
        assert env.end(Sent(0, entry[0], ""), ROLLBACK).remark == "rolled back"
        env.flush()
        env.advance(10_000)
        assert env.open == 0


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_count_outcomes(env: TransactionFixture) -> None:
    registry = Registry()
    env.transactions.add_metrics(registry)
    one, two, _ = env.half(), env.half(), env.half()
    env.now_ms += 7_000
    env.end(one)
    env.end(two, ROLLBACK)
    env.advance(7_000)
    text = registry.text()
    assert 'rocketmq_half_messages{topic="T"} 1\n' in text
    assert 'rocketmq_commit_messages_total{topic="T"} 1\n' in text
    assert 'rocketmq_rollback_messages_total{topic="T"} 1\n' in text
    assert 'rocketmq_finish_message_latency_bucket{le="60"} 1\n' in text
    assert 'rocketmq_finish_message_latency_bucket{le="5"} 0\n' in text
    assert "penstock_half_messages_without_producer 1\n" in text
    assert "penstock_half_messages_discarded_total 0\n" in text


# --- order ---------------------------------------------------------------------------------------


def test_tag_filters_of_pulls_do_not_affect_reads(env: TransactionFixture) -> None:
    env.send(body=b"0", tag="blue")
    first, _ = env.half(b"1", tag="red"), env.half(b"2", tag="blue")
    env.pull(subscription="blue")
    assert isinstance(env.broker.handle(env.end_command(first)), Reply | EncodedReply)
    assert env.bodies() == [b"0", b"1"]


def test_requests_of_a_client_wait_for_an_earlier_read(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (env.half(body) for body in (b"1", b"2", b"3"))
    transactions, read_now = env.transactions, env.transactions._read_now
    monkeypatch.setattr(transactions, "_read_now", lambda handle: None)  # as when it is cold
    ahead = env.broker.handle(env.end_command(first))
    monkeypatch.setattr(transactions, "_read_now", read_now)
    behind = env.broker.handle(env.end_command(second))
    assert isinstance(ahead, InThread)
    assert isinstance(behind, InThread)
    assert ahead.ordered_by == behind.ordered_by
    assert ahead.work is not None
    assert behind.work is None
    assert env.broker.handle(env.end_command(third, client=2)).code == 0  # type: ignore[union-attr]
    assert ahead.then(ahead.work()).code == 0  # type: ignore[union-attr]
    assert behind.then(None).code == 0  # type: ignore[union-attr]
    assert env.bodies() == [b"3", b"1", b"2"]
    assert env.end(env.half(b"4")).code == 0


def test_a_failed_read_does_not_block_later_requests(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: int, handed: int) -> bytes:
        raise OSError(errno.EIO, "no")

    sent = env.half(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(env.transactions, "_read_now", lambda handle: None)
        patch.setattr(env.store.lookup, "record", fail)
        with pytest.raises(OSError, match="no"):
            env.end(sent)
    assert isinstance(env.broker.handle(env.end_command(sent)), Reply | EncodedReply)
