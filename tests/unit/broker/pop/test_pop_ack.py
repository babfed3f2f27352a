"""Acknowledgements and changed invisible times of popped messages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import Settings
from penstock.errors import DiskFull
from penstock.rpc.answers import EncodedReply
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import House, house
from tests.unit.broker.pop.pop_kit import REVIVE, Popper, let_pass, stored


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        yield made


@pytest.fixture
def popper(home: House) -> Popper:
    return Popper(home)


def send(home: House, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert home.send(body=text, queue_id=queue_id).code == 0
    home.store.settle()


def test_a_batch_of_acknowledgements(home: House, popper: Popper) -> None:
    for queue_id in range(3):
        send(home, *[b"%d%d" % (queue_id, n) for n in range(4)], queue_id=queue_id)
    popped = popper.pop()
    left = [one for one in popped if one.body in (b"02", b"11")]
    assert popper.ack_batch([one for one in popped if one not in left]).code == 0
    let_pass(home, 10_000)
    home.store.settle()
    assert sorted(popper.bodies()) == [b"02", b"11"]


def test_an_empty_batch_says_so(home: House) -> None:
    assert home.ask(RequestCode.BATCH_ACK_MESSAGE).code == 208
    assert home.ask(RequestCode.BATCH_ACK_MESSAGE, {}, b'{"acks":[]}').code == 208
    assert home.ask(RequestCode.BATCH_ACK_MESSAGE, {}, b"{").code == 29


def test_acknowledgements_that_make_no_sense(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    receipt = popped.receipt
    wrong_queue = popped._replace(receipt=receipt._replace(queue_id=7))
    assert popper.ack(wrong_queue).code == 13
    beyond = popped._replace(receipt=receipt._replace(queue_offset=99))
    answer = popper.ack(beyond)
    assert (answer.code, answer.remark) == (
        208, "offset is illegal, key:T@0, commit:99, store:0~1",
    )  # fmt: skip
    strange = popped._replace(receipt=receipt._replace(revive_queue_id=77))
    assert popper.ack(strange).code == 0  # the batch knows its queue
    unknown = popped._replace(receipt=receipt._replace(pop_ms=5))
    assert popper.ack(unknown).code == 0
    ext = {"consumerGroup": "G", "topic": "T", "queueId": "0", "offset": "0"}
    for text in ("", "1 2", "a b c d e f g h", "0 0 0 0 7 b 0 0"):
        assert home.ask(RequestCode.ACK_MESSAGE, {**ext, "extraInfo": text}).code == 29
    ext["topic"] = "Unknown"
    ext["extraInfo"] = receipt.format()
    assert home.ask(RequestCode.ACK_MESSAGE, ext).code == 17
    let_pass(home, 10_000)
    assert popper.pop() == []


def test_an_unknown_receipt_leaves_nothing_behind(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    before = home.store.log.end
    late = popped._replace(receipt=popped.receipt._replace(pop_ms=home.now_ms - 99_999))
    forged = popped._replace(receipt=popped.receipt._replace(start_offset=5))
    for one in (late, forged):
        assert popper.ack(one).code == 0
        popper.change(one, 5000)
    assert home.store.log.end == before


# --- changed times


@pytest.mark.parametrize("invisible_ms", [2_000, 40_000])
def test_a_message_comes_back_at_its_new_time(
    home: House, popper: Popper, invisible_ms: int
) -> None:
    send(home, b"a", b"b")
    first, second = popper.pop()
    let_pass(home, 1_000)
    changed = popper.change(first, invisible_ms)
    assert changed.receipt.pop_ms == home.now_ms
    popper.ack(second)
    let_pass(home, invisible_ms - 1)
    assert popper.pop() == []
    let_pass(home, 1)
    home.store.settle()
    (again,) = popper.pop()
    assert (again.body, again.message.reconsume_times) == (b"a", 1)


def test_zero_brings_it_back_at_once(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    popper.hold()
    changed = popper.change(popped, 0)
    assert home.broker.due() <= home.now_ms
    home.tick(1)
    (again,) = popper.read(home.woken[0])
    assert again.body == b"a"
    popper.ack(changed)
    popper.ack(again)
    let_pass(home, 60_000)
    assert popper.pop() == []


def test_an_old_receipt_is_worth_nothing(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    changed = popper.change(popped, 20_000)  # in the same millisecond
    assert changed.receipt.pop_ms != popped.receipt.pop_ms
    assert popper.ack(popped).code == 0
    stale = popper.change(popped, 90_000)
    let_pass(home, 20_001)
    home.store.settle()
    (again,) = popper.pop()
    assert popper.ack(stale).code == 0
    assert popper.ack(changed).code == 0
    let_pass(home, 10_000)
    home.store.settle()
    assert [one.message.reconsume_times for one in popper.pop()] == [2]
    assert again.message.reconsume_times == 1


def test_an_acknowledged_message_is_not_lent_again(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    popper.ack(popped)
    popper.change(popped, 1_000)
    let_pass(home, 30_000)
    assert popper.pop() == []


def test_changes_that_make_no_sense(home: House, popper: Popper) -> None:
    send(home, b"a")
    (popped,) = popper.pop()
    beyond = popped._replace(receipt=popped.receipt._replace(queue_offset=1))
    answer = popper.ask_change(beyond, 100)
    assert answer.code == 208
    assert answer.ext == {"popTime": "0", "invisibleTime": "0", "reviveQid": "0"}
    assert popper.ask_change(popped, -1).code == 29
    assert popper.ask_change(popped, 1 << 50).code == 29


# --- the store


def test_a_store_that_refuses_refuses_pops(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    (popped,) = popper.pop(maxMsgNums=1)
    home.store.path.refusal = DiskFull("full")
    answer = popper.ask()
    assert answer.code == 14  # type: ignore[union-attr]
    assert home.context.offsets.get("G", "T", 0) == 1
    assert popper.ack(popped).code == 14
    let_pass(home, 300)
    home.store.path.refusal = None
    assert popper.bodies() == [b"b"]
    assert popper.ack(popped).code == 0
    let_pass(home, 9_000)
    assert popper.pop() == []


def test_acknowledgements_wait_for_the_disk_under_sync_flush(tmp_path: Path) -> None:
    settings = Settings(store=small_config(sync_flush=True))
    with house(tmp_path / "store", settings) as home:
        popper = Popper(home)
        home.send(body=b"a")
        home.store.flusher.pump()
        home.store.settle()
        (popped,) = popper.pop()
        ext = {
            "consumerGroup": "G", "topic": "T", "queueId": "0", "offset": "0",
            "extraInfo": popped.receipt.format(),
        }  # fmt: skip
        answer = home.broker.handle(Command(RequestCode.ACK_MESSAGE, ext, now_ms=home.now_ms))
        assert isinstance(answer, EncodedReply)
        assert answer.offset == home.store.log.end


def test_a_deleted_topic_ends_its_loans(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    (popped, _) = popper.pop()
    assert home.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    config = TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4)
    home.context.topics.put(config, home.now_ms)
    send(home, b"other", b"another")
    assert popper.ack(popped).code in (0, 208)
    let_pass(home, 10_000)
    home.store.settle()
    assert len(home.broker.pop.journal.loans) == 0
    assert popper.bodies() == [b"other", b"another"]


def test_a_deleted_group_ends_its_loans(home: House, popper: Popper) -> None:
    live = home.live.current
    assert live.broker.auto_create_groups
    send(home, b"a")
    popper.pop()
    home.context.groups.delete("G", home.now_ms)
    home.live.change({"autoCreateSubscriptionGroup": "false"})
    let_pass(home, 10_000)
    assert len(home.broker.pop.journal.loans) == 0
    assert stored(home, "%RETRY%G_T") == []


def test_counters(home: House, popper: Popper) -> None:
    send(home, b"a", b"b")
    popper.ack_all(popper.pop()[:1])
    key = ("T", "G")
    assert home.context.stats.acks[key].nums == 1
    assert home.context.stats.batches[key].nums == 1
    loans = home.broker.pop.journal.loans
    assert loans.in_flight == {("T", "G", 0): 1}
    assert sum(len(stored(home, REVIVE, n)) for n in range(8)) == 2
