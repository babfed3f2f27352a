"""Rows on their way: what leaves together, what is sent again, what a failing task says."""

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
from penstock.spark.sink.at_least_once import Courier, Outbox, close_producers
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.send_batches import ALONE_MAX, Bundle, bundles
from penstock.spark.sink.sink_options import SinkOptions
from penstock.testing.clock import VirtualClock

OK = SendStatus.SEND_OK


def options(**given: str) -> SinkOptions:
    return SinkOptions.of({"nameserver": "127.0.0.1:1", **given}, stream=False)


def row(number: int, body: bytes = b"x", *, topic: str = "t", key: str | None = None) -> Outgoing:
    return Outgoing(number, Message(topic, body, keys=[str(number)]), key)


def numbers(bundle: Bundle) -> list[list[int]]:
    return [[one.row for one in request] for request in bundle.requests]


# --- what leaves together ------------------------------------------------------------------------


def test_rows_of_one_topic_leave_together_up_to_the_limits() -> None:
    rows = [row(n, topic="ab"[n % 2]) for n in range(10)]
    found = list(bundles(rows, options(batchCount="3")))
    assert sorted(map(numbers, found)) == [[[0, 2, 4]], [[1, 3, 5]], [[6, 8]], [[7, 9]]]
    assert all(bundle.together for bundle in found)
    found = list(bundles([row(n, b"x" * 350) for n in range(5)], options(batchBytes="1000")))
    assert list(map(numbers, found)) == [[[0, 1]], [[2, 3]], [[4]]]
    assert [bundle.size for bundle in found] == [1_000, 1_000, 500]


def test_properties_count_as_well() -> None:
    """They may be far longer than bodies, and a request of one key must be one request."""
    rows = [
        Outgoing(n, Message("t", b"x", properties={"p": "y" * 10_000}), "key") for n in range(100)
    ]
    (found,) = bundles(rows, options())
    assert all(len(request) <= 26 for request in found.requests)
    assert found.size > 1_000_000


def test_what_waits_and_what_is_compressed_leaves_alone() -> None:
    late = Outgoing(1, Message("t", b"x", delay_level=2), None)
    rows = [row(0), late, row(2, b"y" * 5_000), row(3)]
    together, alone = sorted(bundles(rows, options()), key=numbers)
    assert numbers(together) == [[0, 3]]
    assert together.together
    assert numbers(alone) == [[1, 2]]
    assert not alone.together
    (both,) = bundles([row(0), row(2, b"y" * 5_000)], options(compression="none"))
    assert numbers(both) == [[0, 2]]


def test_rows_with_one_key_stay_in_their_order() -> None:
    rows = [row(n, key="a" if n != 3 else "b") for n in range(6)]
    rows[2] = row(2, b"y" * 5_000, key="a")
    lane, alone = bundles(rows, options())
    assert numbers(lane) == [[0, 1], [2], [4, 5]]
    assert lane.together
    assert numbers(alone) == [[3]]
    assert not alone.together


def test_many_keys_of_one_row_each_are_looked_after_together() -> None:
    rows = [row(n, key=str(n)) for n in range(ALONE_MAX + 1)]
    found = list(bundles(rows, options()))
    assert [len(bundle.requests[0]) for bundle in found] == [ALONE_MAX, 1]
    assert not any(bundle.together for bundle in found)


def test_every_row_leaves_once() -> None:
    rows = [
        Outgoing(n, Message("ab"[n % 3 == 0], b"z" * (n * 37 % 6_000 + 1)), [None, "k", "l"][n % 3])
        for n in range(500)
    ]
    found = [one for p in bundles(rows, options()) for request in p.requests for one in request]
    assert sorted(one.row for one in found) == list(range(500))


# --- until it is acknowledged --------------------------------------------------------------------

Answer = Callable[[Message], "SendStatus | Exception"]


class Brokers:
    """A producer whose answers the test gives; `sent` has each request's keys."""

    def __init__(self, answer: Answer = lambda message: OK) -> None:
        self.answer = answer
        self.sent: list[list[str]] = []
        self.ordering: list[str | None] = []

    def submit(
        self, message: Message, *, ordering_key: str | None = None
    ) -> "asyncio.Future[SendReceipt]":
        self._note([message], ordering_key)
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
        self._note(messages, ordering_key)
        outcomes = [self.answer(message) for message in messages]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [self._receipt(one) for one in outcomes if isinstance(one, SendStatus)]

    def _note(self, messages: Sequence[Message], ordering_key: str | None) -> None:
        self.sent.append([message.keys[0] for message in messages])
        self.ordering.append(ordering_key)

    @staticmethod
    def _receipt(status: SendStatus) -> SendReceipt:
        return SendReceipt(status, "id", "offset-id", MessageQueue("t", "broker-a", 0), 0)


def deliver(
    brokers: Brokers, rows: list[Outgoing], *, known: Sequence[str] = ("t",), **given: str
) -> None:
    """All rows, one bundle after the other; an error's `figure` is the time that has passed."""
    clock = VirtualClock()
    settings = options(**given)
    began_ms = clock.now_ms()

    async def work() -> None:
        courier = Courier(brokers, settings, partition=3, known=set(known), clock=clock)
        for bundle in bundles(rows, settings):
            task = asyncio.ensure_future(courier.deliver(bundle))
            while not task.done():
                await clock.elapse(100)
            await task

    try:
        asyncio.run(work())
    except PenstockError as error:
        error.figure = clock.now_ms() - began_ms
        raise


def failing(times: int, error: PenstockError, key: str | None = None) -> Answer:
    """Answers that are errors so many times, for all messages or the one with this key."""
    left = times

    def answer(message: Message) -> SendStatus | Exception:
        nonlocal left
        if left and (key is None or message.keys[0] == key):
            left -= 1
            return error
        return OK

    return answer


def test_a_request_that_fails_is_sent_again() -> None:
    brokers = Brokers(failing(4, SendFailed("no answer")))
    deliver(brokers, [row(n) for n in range(2)])
    assert brokers.sent == [["0", "1"]] * 3


def test_of_rows_alone_only_the_failed_are_sent_again() -> None:
    brokers = Brokers(failing(1, SendFailed("no answer"), key="1"))
    deliver(brokers, [row(n, b"y" * 5_000) for n in range(3)])
    assert brokers.sent == [["0"], ["1"], ["2"], ["1"]]


def test_after_the_time_allowed_the_rows_and_the_cause_are_named() -> None:
    brokers = Brokers(lambda message: SendFailed("all brokers are down"))
    with pytest.raises(WriteGaveUp) as caught:
        deliver(brokers, [row(n) for n in range(2, 5)], deliveryTimeout="10s")
    text = str(caught.value)
    assert text.startswith("3 rows, 2 to 4, of partition 3 for the topic 't': not acknowledged")
    assert "all brokers are down" in text
    assert 5 < len(brokers.sent) < 30  # patience grows


def test_the_row_that_is_wrong_is_named_and_only_it() -> None:
    brokers = Brokers(lambda message: MessageIllegal("too long") if message.keys[0] == "2" else OK)
    with pytest.raises(RowRefused, match=r"^row 2 of partition 3: too long$"):
        deliver(brokers, [row(n) for n in range(4)])


def test_what_is_forbidden_is_not_tried_again() -> None:
    brokers = Brokers(lambda message: NoPermission("topic t: no right to PUB"))
    with pytest.raises(NoPermission) as caught:
        deliver(brokers, [row(n) for n in range(4)])
    assert len(brokers.sent) == 1
    assert caught.value.__notes__ == ["while sending row 0 of partition 3 for the topic 't'"]


@pytest.mark.parametrize(
    ("known", "least_ms", "most_ms"), [([], 10_000, 13_000), (["t"], 20_000, 23_000)]
)
def test_a_topic_that_was_there_is_waited_for_longer(
    known: list[str], least_ms: int, most_ms: int
) -> None:
    brokers = Brokers(lambda message: NoRoute("no topic 't'; similar: 'tt'"))
    with pytest.raises(NoRoute, match="similar") as caught:
        deliver(brokers, [row(0), row(1)], known=known, deliveryTimeout="20s")
    assert caught.value.figure is not None
    assert least_ms <= caught.value.figure <= most_ms


def test_stored_and_not_safe_is_not_written() -> None:
    brokers = Brokers(lambda message: SendStatus.SLAVE_NOT_AVAILABLE)
    with pytest.raises(WriteGaveUp, match="answers SLAVE_NOT_AVAILABLE"):
        deliver(brokers, [row(0), row(1)])
    assert brokers.sent == [["0", "1"]] * 3
    brokers.sent.clear()
    deliver(brokers, [row(0), row(1)], acks="1")
    assert brokers.sent == [["0", "1"]]


def test_requests_with_one_key_leave_one_after_the_other() -> None:
    brokers = Brokers(failing(1, SendFailed("no answer"), key="0"))
    deliver(brokers, [row(n, key="k") for n in range(4)], batchCount="2")
    assert brokers.sent == [["0", "1"], ["0", "1"], ["2", "3"]]
    assert brokers.ordering == ["k"] * 3


def test_an_error_of_ours_is_not_swallowed() -> None:
    brokers = Brokers(lambda message: ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        deliver(brokers, [row(0, b"y" * 5_000)])


# --- the task's side -----------------------------------------------------------------------------


@pytest.fixture
def producers() -> Iterator[None]:
    yield
    close_producers()


@pytest.mark.usefixtures("producers")
def test_without_a_nameserver_the_task_fails_with_the_rows_in_its_hand() -> None:
    given = options(topic="t", deliveryTimeout="1ms", requestTimeout="200ms")

    def write() -> None:
        with Outbox(given, 7) as outbox:
            outbox.put([row(0), row(1)])
            outbox.put([])

    with pytest.raises(WriteGaveUp, match="2 rows, 0 to 1, of partition 7"):
        write()


def test_a_task_without_rows_connects_to_nobody() -> None:
    with Outbox(options(topic="t"), 0) as outbox:
        outbox.put([])
