"""Transactions: halves are invisible until committed, and end once, whatever comes again."""

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
    HALF,
    INTERVAL_MS,
    OP,
    PARKED,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Sent,
    Trade,
    trade,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Trade]:
    with trade(tmp_path / "store") as made:
        yield made


def configured(*, sync_flush: bool = False, **broker: object) -> Settings:
    settings = Settings(store=small_config(sync_flush=sync_flush))
    return msgspec.structs.replace(
        settings, broker=msgspec.structs.replace(settings.broker, **broker)
    )


# --- halves --------------------------------------------------------------------------------------


def test_a_half_lies_in_the_half_topic_with_its_own_place(home: Trade) -> None:
    answer = home.send_half(b"x", queue_id=2, tag="vip", properties={"k": "v"})
    (half,) = home.stored(HALF)
    assert answer.ext is not None
    assert answer.ext["queueId"] == "2"
    assert answer.ext["queueOffset"] == "0"
    assert answer.ext["msgId"] == half.offset_id
    assert answer.ext["transactionId"] == half.unique_id
    assert (half.sys_flag, half.prepared_offset, half.tags) == (0, 0, "vip")
    assert half.properties == half.properties | {
        "REAL_TOPIC": "T", "REAL_QID": "2", "TRAN_MSG": "true", "PGROUP": "P", "k": "v",
        "__transactionId__": half.unique_id,
    }  # fmt: skip


def test_a_half_is_never_visible(home: Trade) -> None:
    home.half(b"secret")
    home.let_pass(200_000)
    assert home.bodies() == []
    answer = home.pull(flags=0)
    assert answer.code != 0  # type: ignore[union-attr]


def test_the_prepared_flag_is_cleared_in_the_half(home: Trade) -> None:
    frame = home.send_frame(properties={"TRAN_MSG": "true", "PGROUP": "P"})
    frame = frame.replace(b'"f":"0"', b'"f":"4"')
    assert home.frame(frame).code == 0  # type: ignore[union-attr]
    (half,) = home.stored(HALF)
    assert half.sys_flag == 0
    assert home.end(Sent(0, half.physical_offset, half.unique_id or "")).code == 0
    (message,) = home.stored()
    assert message.sys_flag == COMMIT


def test_transactions_can_be_refused(tmp_path: Path) -> None:
    with trade(tmp_path / "store", configured(reject_transactions=True)) as home:
        answer = home.send_half()
        assert answer.code == 16
        assert "reject_transactions" in (answer.remark or "")
        assert home.send().code == 0


def test_a_half_without_a_producer_group_is_refused(home: Trade) -> None:
    answer = home.send(properties={"TRAN_MSG": "true"})
    assert answer.code == 13
    assert "PGROUP" in (answer.remark or "")


def test_so_many_halves_may_be_open(tmp_path: Path) -> None:
    with trade(tmp_path / "store", configured(open_transactions_max=3)) as home:
        sent = [home.half() for _ in range(3)]
        home.let_pass(1000)
        answer = home.send_half()
        assert answer.code == 2
        assert "open_transactions_max" in (answer.remark or "")
        home.end(sent[1], ROLLBACK)
        home.half()


def test_properties_leave_room_for_the_bookkeeping(tmp_path: Path) -> None:
    roomy = msgspec.structs.replace(small_config(sync_flush=False), segment_bytes=1 << 18)
    with trade(tmp_path / "store", Settings(store=roomy)) as home:
        home.half(properties={"k": "v" * 32_000})
        home.come()
        for _ in range(2):
            (check,) = home.let_pass(INTERVAL_MS)
            home.end(check.handle, UNKNOWN, checked=True)
        assert [len(half.properties["k"]) for half in home.stored(HALF)] == [32_000] * 2
        answer = home.send_half(properties={"k": "v" * 32_400})
        assert answer.code == 13
        assert "room" in (answer.remark or "")


def test_a_message_as_long_as_a_segment_is_committed_after_checks(home: Trade) -> None:
    length = small_config(sync_flush=False).segment_bytes - 8 - 330
    home.half(b"x" * length)
    home.come()
    for _ in range(3):
        (check,) = home.let_pass(INTERVAL_MS)
        home.end(check.handle, UNKNOWN, checked=True)
    (check,) = home.let_pass(INTERVAL_MS)
    assert home.end(check.handle, checked=True).code == 0
    assert [len(body) for body in home.bodies()] == [length]


def test_bookkeeping_of_a_client_does_not_count(home: Trade) -> None:
    home.come()
    home.half(properties={"TRANSACTION_CHECK_TIMES": "99", "TRAN_PREPARED_QUEUE_OFFSET": "0"})
    home.half(properties={"TRANSACTION_CHECK_TIMES": "99", "TRAN_PREPARED_QUEUE_OFFSET": "0"})
    home = home.restart()
    home.come()
    checks = home.let_pass(TIMEOUT_MS + 1000)
    assert [check.handle.queue_offset for check in checks] == [0, 1]
    home.close()


# --- commit and rollback -------------------------------------------------------------------------


def test_a_commit_stores_the_message_and_right_behind_it_the_op(home: Trade) -> None:
    home.send(body=b"first")
    sent = home.half(b"x", queue_id=1, tag="vip", properties={"KEYS": "a b"})
    home.now_ms += 500
    answer = home.end(sent)
    assert (answer.code, answer.remark) == (0, "done: committed")
    (half,) = home.stored(HALF)
    (message,) = home.stored(queue_id=1)
    (op,) = home.stored(OP)
    for name in ("body", "flag", "born_ms", "born_host", "store_host", "body_crc"):
        assert getattr(message, name) == getattr(half, name), name
    assert {**message.properties, "REAL_TOPIC": "T", "REAL_QID": "1"} == half.properties
    assert "REAL_TOPIC" not in message.properties
    assert message.sys_flag == COMMIT
    assert message.prepared_offset == sent.log_offset
    assert message.store_ms == half.store_ms + 500
    assert op.physical_offset == message.physical_offset + message.size
    assert (op.body, op.tags, op.queue_id, op.sys_flag) == (b"0,", "d", 0, 0)


def test_consumers_get_it_with_the_commit(home: Trade) -> None:
    sent = home.half(b"x")
    home.end(sent)
    assert bodies(home.pull(flags=4)) == [b"x"]


def test_a_rollback_stores_the_op_only(home: Trade) -> None:
    sent = home.half()
    answer = home.end(sent, ROLLBACK)
    assert (answer.code, answer.remark) == (0, "done: rolled back")
    assert home.stored() == []
    assert home.ops() == [b"0,"]


def test_what_is_done_is_not_done_again(home: Trade) -> None:
    good, bad = home.half(b"good"), home.half(b"bad")
    home.end(good)
    home.end(bad, ROLLBACK)
    end = home.store.log.end
    for _ in range(3):
        assert home.end(good).remark == "done before: committed"
        assert home.end(bad, ROLLBACK).remark == "done before: rolled back"
        home.let_pass(60_000)
    assert home.store.log.end == end


def test_what_ended_stays_ended(home: Trade) -> None:
    good, bad = home.half(b"good"), home.half(b"bad")
    home.end(good)
    home.end(bad, ROLLBACK)
    answer = home.end(good, ROLLBACK)
    assert answer.code == 200
    assert "committed before" in (answer.remark or "")
    answer = home.end(bad)
    assert answer.code == 201
    assert "rolled back before" in (answer.remark or "")
    assert home.bodies() == [b"good"]


def test_unknown_is_answered_and_changes_nothing(home: Trade) -> None:
    sent = home.half()
    end = home.store.log.end
    answer = home.end(sent, UNKNOWN)
    assert answer.code == 0
    assert "unknown" in (answer.remark or "")
    assert home.store.log.end == end
    assert home.end(sent).code == 0
    assert home.end(sent, UNKNOWN).remark == "done before: committed"


def test_a_one_way_request_is_not_answered(home: Trade) -> None:
    sent = home.half(b"x")
    ext = {
        "producerGroup": "P", "tranStateTableOffset": str(sent.queue_offset),
        "commitLogOffset": str(sent.log_offset), "commitOrRollback": "8", "msgId": sent.key,
    }  # fmt: skip
    command = Command(RequestCode.END_TRANSACTION, ext, now_ms=home.now_ms, flag=2)
    assert home.finish(home.broker.handle(command)) is None
    assert home.bodies() == [b"x"]


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"group": "Q"}, "producer group"),
        ({"tranStateTableOffset": "1"}, "belong together"),
        ({"tranStateTableOffset": "7"}, "belong together"),
        ({"commitLogOffset": "1"}, ""),
        ({"commitLogOffset": "999999"}, ""),
        ({"commitLogOffset": "0", "tranStateTableOffset": "9"}, "no half"),
    ],
)
def test_a_wrong_handle_is_refused(home: Trade, changed: dict[str, str], word: str) -> None:
    home.send(body=b"no half")
    sent, other = home.half(b"a"), home.half(b"b")
    assert other.queue_offset == 1
    fields = {name: value for name, value in changed.items() if name != "group"}
    answer = home.end(sent, group=changed.get("group", "P"), fields=fields)
    assert answer.code == 1
    assert word in (answer.remark or "")
    assert home.bodies() == [b"no half"]
    assert home.ops() == []
    assert home.end(sent).code == 0
    home.let_pass(1000)
    assert home.end(other).code == 0


def test_the_right_on_its_topic_is_needed(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = home.half(b"x")
    asked = []

    def check_write(command: Command, topic: str) -> Reply | None:
        asked.append(topic)
        return Reply(16)

    monkeypatch.setattr(
        type(home.context.access), "check_write", lambda _, *args: check_write(*args)
    )
    assert home.end(sent, checked=True, fields={"topic": HALF}).code == 16
    assert asked == ["T"]
    monkeypatch.undo()
    assert home.bodies() == []
    assert home.end(sent).remark == "done: committed"


@pytest.mark.parametrize("state", ["1", "4", "-1", "x", ""])
def test_another_state_is_refused(home: Trade, state: str) -> None:
    assert home.end(home.half(), fields={"commitOrRollback": state}).code == 29


def test_an_old_half_is_read_by_the_pool(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = home.half(b"x")
    monkeypatch.setattr(home.transactions, "_read_now", lambda handle: None)
    assert home.end(sent).remark == "done: committed"
    assert home.end(sent).remark == "done before: committed"


def test_a_half_of_a_deleted_topic_is_parked(home: Trade) -> None:
    sent = home.half(b"x")
    home.context.topics.delete("T", home.now_ms)
    answer = home.end(sent)
    assert answer.code == 17
    assert PARKED in (answer.remark or "")
    assert home.bodies(PARKED) == [b"x"]
    assert home.ops() == [b"0,"]
    assert home.end(sent).code == 201


def test_in_a_smaller_topic_it_goes_where_consumers_look(home: Trade) -> None:
    sent = home.half(b"x", queue_id=3)
    smaller = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=6)
    home.context.topics.put(smaller, home.now_ms)
    home.end(sent)
    assert home.bodies(queue_id=1) == [b"x"]


# --- delays --------------------------------------------------------------------------------------


def test_a_delay_begins_with_the_commit(home: Trade) -> None:
    sent = home.half(b"x", properties={"DELAY": "2"}, queue_id=1)
    assert home.bodies("SCHEDULE_TOPIC_XXXX", 1) == []
    home.let_pass(5500)
    home.end(sent)
    (parked,) = home.stored("SCHEDULE_TOPIC_XXXX", 1)
    assert (parked.sys_flag, parked.prepared_offset) == (COMMIT, sent.log_offset)
    home.let_pass(4999)
    assert home.bodies(queue_id=1) == []
    home.let_pass(1)
    (message,) = home.stored(queue_id=1)
    assert (message.body, message.sys_flag) == (b"x", COMMIT)
    assert home.end(sent).remark == "done before: committed"
    home = home.restart()
    assert home.end(sent).remark == "done before: committed"
    assert home.end(sent, ROLLBACK).code == 200
    home.close()


def test_a_time_of_its_own_is_kept(home: Trade) -> None:
    due_ms = home.now_ms + 10_000
    sent = home.half(b"x", properties={"TIMER_DELIVER_MS": str(due_ms)})
    home.end(sent)
    home.let_pass(9_000)
    assert home.bodies() == []
    home.let_pass(3_000)
    assert home.bodies() == [b"x"]


@pytest.mark.parametrize("properties", [{"DELAY": "x"}, {"TIMER_DELIVER_MS": "x"}])
def test_a_delay_that_can_not_be_is_refused_at_once(
    home: Trade, properties: dict[str, str]
) -> None:
    assert home.send_half(properties=properties).code != 0
    assert home.store.log.end == 0


# --- a store that refuses ------------------------------------------------------------------------


def test_while_the_store_refuses_the_half_stays_open(home: Trade) -> None:
    sent, other = home.half(b"x"), home.half(b"y")
    home.store.path.refusal = DiskFull("no space")
    assert home.end(sent).code == 14
    assert home.end(other, ROLLBACK).code == 14
    home.store.path.refusal = None
    assert home.end(sent).remark == "done: committed"
    assert home.end(other, ROLLBACK).code == 0
    home.let_pass(1000)
    assert home.bodies() == [b"x"]
    assert sorted(b",".join(home.ops()).replace(b",,", b",")) == sorted(b"0,1,")


def test_an_op_that_was_refused_is_written_later(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.send(body=b"first")
    half_log = home.transactions._log
    one, two, three = (home.half(body) for body in (b"1", b"2", b"3"))
    put_op = half_log._put_op
    monkeypatch.setattr(half_log, "_put_op", lambda body, now_ms: False)
    assert home.end(one).remark == "done: committed"  # the message is there: it is a promise
    assert home.end(two, ROLLBACK).code == 14
    assert home.end(two, ROLLBACK).code == 14
    home.flush()
    home.let_pass(3000)
    assert home.progress(HALF) is None
    monkeypatch.setattr(half_log, "_put_op", put_op)
    assert home.end(three).remark == "done: committed"
    assert home.ops() == [b"0,1,2,"]
    assert home.end(two, ROLLBACK).remark == "done before: rolled back"
    assert home.bodies() == [b"first", b"1", b"3"]


def test_many_ops_are_written_in_pieces(home: Trade) -> None:
    home.transactions._log.finish(range(2000), home.now_ms)
    pieces = home.ops()
    assert len(pieces) == 3
    assert [int(n) for n in b"".join(pieces).split(b",")[:-1]] == list(range(2000))


# --- sync flush ----------------------------------------------------------------------------------


def test_under_sync_flush_the_answer_waits_for_the_disk(tmp_path: Path) -> None:
    with trade(tmp_path / "store", configured(sync_flush=True)) as home:
        home.send_half(b"x")
        home.flush()
        (half,) = home.stored(HALF)
        for state, remark in ((COMMIT, "done: committed"), (COMMIT, "done before: committed")):
            ext = {
                "producerGroup": "P", "tranStateTableOffset": "0", "msgId": "x",
                "commitLogOffset": str(half.physical_offset), "commitOrRollback": str(state),
            }  # fmt: skip
            command = Command(RequestCode.END_TRANSACTION, ext, now_ms=home.now_ms)
            answer = home.broker.handle(command)
            assert isinstance(answer, EncodedReply)
            assert answer.offset == home.store.log.end > half.physical_offset + half.size
            assert read_reply(answer.data).remark == remark
            assert read_reply(answer.late).code == 10
        assert home.bodies() == []
        home.flush()
        assert home.bodies() == [b"x"]


def test_a_half_that_is_not_on_the_disk_yet_can_be_rolled_back(tmp_path: Path) -> None:
    # Clients roll back when their send was answered FLUSH_DISK_TIMEOUT.
    with trade(tmp_path / "store", configured(sync_flush=True)) as home:
        home.send_half(b"x")
        home.store.settle()
        entry = home.store.make_queue(HALF.encode(), 0).entry(0)  # type: ignore[union-attr]
        assert entry is not None
        assert home.end(Sent(0, entry[0], ""), ROLLBACK).remark == "done: rolled back"
        home.flush()
        home.let_pass(10_000)
        assert home.open == 0


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_tell_how_halves_end(home: Trade) -> None:
    registry = Registry()
    home.transactions.add_metrics(registry)
    one, two, _ = home.half(), home.half(), home.half()
    home.now_ms += 7_000
    home.end(one)
    home.end(two, ROLLBACK)
    home.let_pass(7_000)
    text = registry.text()
    assert 'rocketmq_half_messages{topic="T"} 1\n' in text
    assert 'rocketmq_commit_messages_total{topic="T"} 1\n' in text
    assert 'rocketmq_rollback_messages_total{topic="T"} 1\n' in text
    assert 'rocketmq_finish_message_latency_bucket{le="60"} 1\n' in text
    assert 'rocketmq_finish_message_latency_bucket{le="5"} 0\n' in text
    assert "penstock_halves_without_producer 1\n" in text
    assert "penstock_halves_parked_total 0\n" in text


# --- order ---------------------------------------------------------------------------------------


def test_the_tags_that_others_pull_do_not_matter(home: Trade) -> None:
    home.send(body=b"0", tag="blue")
    first, _ = home.half(b"1", tag="red"), home.half(b"2", tag="blue")
    home.pull(subscription="blue")
    assert isinstance(home.broker.handle(home.end_command(first)), Reply | EncodedReply)
    assert home.bodies() == [b"0", b"1"]


def test_ends_wait_for_one_before_them_that_is_read_in_a_thread(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (home.half(body) for body in (b"1", b"2", b"3"))
    transactions, read_now = home.transactions, home.transactions._read_now
    monkeypatch.setattr(transactions, "_read_now", lambda handle: None)  # as when it is cold
    ahead = home.broker.handle(home.end_command(first))
    monkeypatch.setattr(transactions, "_read_now", read_now)
    behind = home.broker.handle(home.end_command(second))
    assert isinstance(ahead, InThread)
    assert isinstance(behind, InThread)
    assert ahead.ordered_by == behind.ordered_by
    assert ahead.work is not None
    assert behind.work is None
    assert home.broker.handle(home.end_command(third, client=2)).code == 0  # type: ignore[union-attr]
    assert ahead.then(ahead.work()).code == 0  # type: ignore[union-attr]
    assert behind.then(None).code == 0  # type: ignore[union-attr]
    assert home.bodies() == [b"3", b"1", b"2"]
    assert home.end(home.half(b"4")).code == 0


def test_a_record_that_can_t_be_read_ends_the_waiting_too(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: int, handed: int) -> bytes:
        raise OSError(errno.EIO, "no")

    sent = home.half(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(home.transactions, "_read_now", lambda handle: None)
        patch.setattr(home.store.lookup, "record", fail)
        with pytest.raises(OSError, match="no"):
            home.end(sent)
    assert isinstance(home.broker.handle(home.end_command(sent)), Reply | EncodedReply)
