"""The at-least-once writer: send batches, retries, and the errors of a failed task."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.errors import (
    MessageIllegal,
    NoPermission,
    NoRoute,
    PenstockError,
    RowRefused,
    SendFailed,
    WriteGaveUp,
)
from penstock.spark.sink.at_least_once import AtLeastOnceWriter, BatchSender, close_producers
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.send_batches import SINGLE_ROWS_MAX, SendBatch, make_send_batches
from penstock.spark.sink.sink_options import SinkOptions
from penstock.testing.virtual_clock import VirtualClock

OK = SendStatus.SEND_OK


def options(**given: str) -> SinkOptions:
    return SinkOptions.of({"nameserver": "127.0.0.1:1", **given}, stream=False)


def row(number: int, body: bytes = b"x", *, topic: str = "t", key: str | None = None) -> RowMessage:
    return RowMessage(number, Message(topic, body, keys=[str(number)]), key)


def row_numbers(batch: SendBatch) -> list[list[int]]:
    return [[one.row for one in request] for request in batch.requests]


# --- send batches --------------------------------------------------------------------------------


def test_rows_of_one_topic_share_requests_up_to_the_limits() -> None:
    rows = [row(n, topic="ab"[n % 2]) for n in range(10)]
    found = list(make_send_batches(rows, options(batchCount="3")))
    assert sorted(map(row_numbers, found)) == [[[0, 2, 4]], [[1, 3, 5]], [[6, 8]], [[7, 9]]]
    assert all(batch.together for batch in found)
    found = list(
        make_send_batches([row(n, b"x" * 350) for n in range(5)], options(batchBytes="1000"))
    )
    assert list(map(row_numbers, found)) == [[[0, 1]], [[2, 3]], [[4]]]
    assert [batch.size for batch in found] == [1_000, 1_000, 500]


def test_properties_count_towards_the_batch_size() -> None:
    """They may be far longer than bodies."""
    rows = [
        RowMessage(n, Message("t", b"x", properties={"p": "y" * 10_000}), "key") for n in range(100)
    ]
    (found,) = make_send_batches(rows, options())
    assert all(len(request) <= 26 for request in found.requests)
    assert found.size > 1_000_000


def test_delayed_and_compressed_rows_are_sent_alone() -> None:
    late = RowMessage(1, Message("t", b"x", delay_level=2), None)
    rows = [row(0), late, row(2, b"y" * 5_000), row(3)]
    together, alone = sorted(make_send_batches(rows, options()), key=row_numbers)
    assert row_numbers(together) == [[0, 3]]
    assert together.together
    assert row_numbers(alone) == [[1, 2]]
    assert not alone.together
    (both,) = make_send_batches([row(0), row(2, b"y" * 5_000)], options(compression="none"))
    assert row_numbers(both) == [[0, 2]]


def test_rows_with_the_same_key_keep_their_order() -> None:
    rows = [row(n, key="a" if n != 3 else "b") for n in range(6)]
    rows[2] = row(2, b"y" * 5_000, key="a")
    keyed, alone = make_send_batches(rows, options())
    assert row_numbers(keyed) == [[0, 1], [2], [4, 5]]
    assert keyed.together
    assert row_numbers(alone) == [[3]]
    assert not alone.together


def test_keys_with_a_single_row_share_a_send_batch() -> None:
    rows = [row(n, key=str(n)) for n in range(SINGLE_ROWS_MAX + 1)]
    found = list(make_send_batches(rows, options()))
    assert [len(batch.requests[0]) for batch in found] == [SINGLE_ROWS_MAX, 1]
    assert not any(batch.together for batch in found)


def test_every_row_is_in_one_send_batch() -> None:
    rows = [
        RowMessage(
            n, Message("ab"[n % 3 == 0], b"z" * (n * 37 % 6_000 + 1)), [None, "k", "l"][n % 3]
        )
        for n in range(500)
    ]
    found = [
        one for p in make_send_batches(rows, options()) for request in p.requests for one in request
    ]
    assert sorted(one.row for one in found) == list(range(500))


# --- retries -------------------------------------------------------------------------------------

Answer = Callable[[Message], "SendStatus | Exception"]


class ScriptedProducer:
    """A producer whose responses the test sets; `sent` has the keys of each request."""

    def __init__(self, answer: Answer = lambda message: OK) -> None:
        self.answer = answer
        self.sent: list[list[str]] = []
        self.ordering: list[str | None] = []

    def submit(
        self, message: Message, *, ordering_key: str | None = None
    ) -> "asyncio.Future[SendReceipt]":
        self._record([message], ordering_key)
        outcome = self.answer(message)
        if isinstance(outcome, MessageIllegal):
            raise outcome
        future = asyncio.get_running_loop().create_future()
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(self._receipt(outcome))
        return future

    async def send_batch(
        self, messages: Sequence[Message], *, ordering_key: str | None = None
    ) -> list[SendReceipt]:
        self._record(messages, ordering_key)
        outcomes = [self.answer(message) for message in messages]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [self._receipt(one) for one in outcomes if isinstance(one, SendStatus)]

    def _record(self, messages: Sequence[Message], ordering_key: str | None) -> None:
        self.sent.append([message.keys[0] for message in messages])
        self.ordering.append(ordering_key)

    @staticmethod
    def _receipt(status: SendStatus) -> SendReceipt:
        return SendReceipt(status, "id", "offset-id", MessageQueue("t", "broker-a", 0), 0)


def deliver(
    brokers: ScriptedProducer,
    rows: list[RowMessage],
    *,
    known: Sequence[str] = ("t",),
    **given: str,
) -> None:
    """Deliver all rows, one send batch after the other; sets an error's `figure` to the time."""
    clock = VirtualClock()
    settings = options(**given)
    began_ms = clock.now_ms()

    async def work() -> None:
        sender = BatchSender(brokers, settings, partition=3, known_topics=set(known), clock=clock)
        for batch in make_send_batches(rows, settings):
            task = asyncio.ensure_future(sender.deliver(batch))
            while not task.done():
                await clock.elapse(100)
            await task

    try:
        asyncio.run(work())
    except PenstockError as error:
        error.figure = clock.now_ms() - began_ms
        raise


def failing(times: int, error: PenstockError, key: str | None = None) -> Answer:
    """Fails this many times, for all messages or only the one with this key."""
    left = times

    def answer(message: Message) -> SendStatus | Exception:
        nonlocal left
        if left and (key is None or message.keys[0] == key):
            left -= 1
            return error
        return OK

    return answer


def test_failed_request_is_retried() -> None:
    brokers = ScriptedProducer(failing(4, SendFailed("no answer")))
    deliver(brokers, [row(n) for n in range(2)])
    assert brokers.sent == [["0", "1"]] * 3


def test_only_failed_single_rows_are_retried() -> None:
    brokers = ScriptedProducer(failing(1, SendFailed("no answer"), key="1"))
    deliver(brokers, [row(n, b"y" * 5_000) for n in range(3)])
    assert brokers.sent == [["0"], ["1"], ["2"], ["1"]]


def test_delivery_timeout_names_the_rows_and_the_cause() -> None:
    brokers = ScriptedProducer(lambda message: SendFailed("all brokers are down"))
    with pytest.raises(WriteGaveUp) as caught:
        deliver(brokers, [row(n) for n in range(2, 5)], deliveryTimeout="10s")
    text = str(caught.value)
    assert text.startswith("3 rows, 2 to 4, of partition 3 for the topic 't': not acknowledged")
    assert "all brokers are down" in text
    assert 5 < len(brokers.sent) < 30  # the back-off grows


def test_illegal_row_is_named() -> None:
    brokers = ScriptedProducer(
        lambda message: MessageIllegal("too long") if message.keys[0] == "2" else OK
    )
    with pytest.raises(RowRefused, match=r"^row 2 of partition 3: too long"):
        deliver(brokers, [row(n) for n in range(4)])


def test_permission_error_is_not_retried() -> None:
    brokers = ScriptedProducer(lambda message: NoPermission("topic t: no right to PUB"))
    with pytest.raises(NoPermission) as caught:
        deliver(brokers, [row(n) for n in range(4)])
    assert len(brokers.sent) == 1
    assert caught.value.__notes__[-1] == "while sending row 0 of partition 3 for the topic 't'"


@pytest.mark.parametrize(
    ("known", "least_ms", "most_ms"), [([], 5_000, 8_000), (["t"], 20_000, 23_000)]
)
def test_known_topic_is_waited_for_longer(known: list[str], least_ms: int, most_ms: int) -> None:
    brokers = ScriptedProducer(lambda message: NoRoute("no topic 't'; similar: 'tt'"))
    with pytest.raises(NoRoute, match="similar") as caught:
        deliver(brokers, [row(0), row(1)], known=known, deliveryTimeout="20s")
    assert caught.value.figure is not None
    assert least_ms <= caught.value.figure <= most_ms


def test_message_that_is_not_durable_fails_unless_acks_is_1() -> None:
    brokers = ScriptedProducer(lambda message: SendStatus.SLAVE_NOT_AVAILABLE)
    with pytest.raises(WriteGaveUp, match="answers SLAVE_NOT_AVAILABLE"):
        deliver(brokers, [row(0), row(1)])
    assert brokers.sent == [["0", "1"]] * 3
    brokers.sent.clear()
    deliver(brokers, [row(0), row(1)], acks="1")
    assert brokers.sent == [["0", "1"]]


def test_requests_with_the_same_key_are_sent_in_order() -> None:
    brokers = ScriptedProducer(failing(1, SendFailed("no answer"), key="0"))
    deliver(brokers, [row(n, key="k") for n in range(4)], batchCount="2")
    assert brokers.sent == [["0", "1"], ["0", "1"], ["2", "3"]]
    assert brokers.ordering == ["k"] * 3


def test_unexpected_error_is_raised() -> None:
    brokers = ScriptedProducer(lambda message: ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        deliver(brokers, [row(0, b"y" * 5_000)])


# --- in the task's thread-------------------------------------------------------------------------


@pytest.fixture
def producers() -> Iterator[None]:
    yield
    close_producers()


@pytest.mark.usefixtures("producers")
def test_unreachable_nameserver_fails_the_task_and_names_the_rows() -> None:
    given = options(topic="t", deliveryTimeout="1ms", requestTimeout="200ms")

    def write() -> None:
        with AtLeastOnceWriter(given, 7) as writer:
            writer.put([row(0), row(1)])
            writer.put([])

    with pytest.raises(WriteGaveUp, match="2 rows, 0 to 1, of partition 7"):
        write()


def test_task_without_rows_does_not_connect() -> None:
    with AtLeastOnceWriter(options(topic="t"), 0) as writer:
        writer.put([])
