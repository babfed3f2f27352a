"""Receipt handles that are read in place, and acks that are left to the rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.pop.in_place.pop_ack_handler import ReceiptReader
from penstock.errors import HeaderError
from penstock.wire.codes import RequestCode
from penstock.wire.output import encode
from penstock.wire.receipt_handle import parse_receipt
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient

WORDS = st.lists(
    st.one_of(
        st.integers(0, 2**64).map(str),
        st.sampled_from(["", "0", "1", "2", "3", "00", "-1", "+1", "broker", "é", "²", "1_0"]),
    ),
    max_size=10,
)
HANDLES = st.one_of(
    WORDS.map(" ".join),
    st.builds(
        "{} 1700000000000 {} {} {} {} {}{}".format,
        st.integers(0, 10**19),
        st.integers(0, 10**6),
        st.integers(0, 2**31),
        st.integers(0, 3),
        st.sampled_from(["b", "", "broker-a", "ü", "b" * 1100]),
        st.integers(0, 2**31),
        st.sampled_from(["", " ", " 7", " x", " 7 8", " 7 x", "  "]),
    ),
)


@given(HANDLES)
def test_a_receipt_handle_is_read_as_it_is_parsed(text: str) -> None:
    reader, data = ReceiptReader(), b"9 " + text.encode() + b" 1"
    if not reader.read(memoryview(bytearray(data)), 2, len(data) - 4):
        return  # it is left to `parse_receipt`
    receipt = parse_receipt(text)
    assert (
        reader.start_offset,
        reader.pop_ms,
        reader.invisible_ms,
        reader.revive_queue_id,
    ) == (receipt.start_offset, receipt.pop_ms, receipt.invisible_ms, receipt.revive_queue_id)


@pytest.mark.parametrize("tail", ["", " 4", " 4 more words"])
@pytest.mark.parametrize("kind", "012")
def test_usual_receipt_handles_are_read(kind: str, tail: str) -> None:
    text = f"10 1700000000000 60000 7 {kind} broker-a 3{tail}"
    parse_receipt(text)
    data, reader = text.encode(), ReceiptReader()
    assert reader.read(memoryview(bytearray(data)), 0, len(data))
    assert (reader.start_offset, reader.pop_ms) == (10, 1_700_000_000_000)
    assert (reader.invisible_ms, reader.revive_queue_id) == (60_000, 7)


@pytest.mark.parametrize(
    "text", ["1 2 3 4 0 b", "1 2 3 4 0 b ", "1 2 3 4 3 b 5", "1 2 3 4 0 b 5 ", "1 2 3 4 0 b 5 x"]
)
def test_invalid_receipt_handles_are_left_to_the_rules(text: str) -> None:
    with pytest.raises(HeaderError):
        parse_receipt(text)
    data = text.encode()
    assert not ReceiptReader().read(memoryview(bytearray(data + b" 7")), 0, len(data))


# --- requests


class Counted(PopClient):
    """A client; counts the requests that are answered by the rules."""

    def __init__(self, env: BrokerFixture) -> None:
        super().__init__(env)
        self.by_rules = 0
        acks = env.broker.pop._acks
        find_range = acks._range

        def count(topic: str, queue_id: int) -> tuple[int, int]:
            self.by_rules += 1
            return find_range(topic, queue_id)

        acks._range = count  # type: ignore[method-assign]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        for number in range(8):
            made.send(body=b"%d" % number)
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> Counted:
    return Counted(env)


def test_the_next_acks_are_handled_in_place(env: BrokerFixture, client: Counted) -> None:
    first, *rest = client.pop(maxMsgNums=4)
    assert client.ack(first).code == 0
    assert client.by_rules == 1
    client.ack_all(rest[:2])
    changed = client.change(rest[2], 20_000)
    assert client.by_rules == 2, "the first change"
    changed = client.change(changed, 30_000)
    client.ack(changed)
    assert client.by_rules == 2
    assert len(env.broker.pop.revive_log.checkpoints) == 0
    env.tick(60_000)
    assert len(client.pop()) == 4, "those that were never popped"


def test_a_deleted_topic_has_no_messages_to_acknowledge(
    env: BrokerFixture, client: Counted
) -> None:
    popped = client.pop()
    client.ack_all(popped[:3])
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert client.ack(popped[3]).code == 17
    env.send(body=b"again")
    assert client.ack(popped[3]).code == 208, "it is beyond the end of the new queue"
    assert client.by_rules == 3


def test_a_topic_with_fewer_queues_refuses_acks_of_the_others(
    env: BrokerFixture, client: Counted
) -> None:
    env.send(queue_id=3, body=b"x")
    popped = [one for one in client.pop() if one.message.queue_id == 3]
    client.ack_all(popped)
    client.ack_all(popped)
    ext = {"topic": "T", "readQueueNums": "2", "writeQueueNums": "2", "perm": "6"}
    assert env.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext).code == 0
    assert client.ack(popped[0]).code == 13


def test_a_one_way_ack_gets_no_response(env: BrokerFixture, client: Counted) -> None:
    popped = client.pop()
    client.ack_all(popped[:2])
    ext = client.named(popped[2].receipt)
    assert env.frame(encode(RequestCode.ACK_MESSAGE, ext, opaque=9, flag=2)) is None
    assert env.broker.pop.revive_log.checkpoints.in_flight == {("T", "G", 0): len(popped) - 3}
