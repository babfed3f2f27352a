"""Pulling one queue: a request waits at the broker for messages, then the next goes out.

An answer's messages are handed on at once, so the next pull is on its way while they are handled,
as long as the queue has room. Progress does not travel with pulls, though the protocol allows it:
Apache's brokers handle pulls and commits in different threads, and a pull that is overtaken by the
last commit of a consumer would undo it. What the broker answers:

    0   messages        handed on, pull after them
    19  none in time    pull again
    20  none for us     pull after what was looked through
    21  offset moved    forward (messages were deleted): pull on there
                        back: the queue is given up and begun anew at the broker's offset
    else                said once, tried again after a while that grows up to three seconds
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.client.client_session import Session
from penstock.client.consumer.process_queue import ProcessQueue, queue_text
from penstock.client.consumer.subscription import Subscription
from penstock.client.received_message import BadRecord, ReceivedMessage, decode_records
from penstock.client.topic_routes import MASTER_ID
from penstock.clock import pause
from penstock.errors import BodyError, NoRoute, PenstockError, refusal
from penstock.transport.peer import Peer
from penstock.wire.codes import (
    PULL_SUSPEND,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
)
from penstock.wire.frame import BINARY, Request

log = logging.getLogger(__name__)

PULL_BATCH = 32
SUSPEND_MS = 15_000
"""How long the broker may hold a pull that finds nothing."""
TIMEOUT_MS = 30_000
AGAIN_MS = 200
AGAIN_MS_MAX = 3_000
BUSY_MS = 20
EMPTY_MS = 100
"""A broker that has nothing holds a pull for longer than this, or is asked again after it."""
TROUBLES_MAX = 16
"""Different failures of one broker that are said until it answers again."""
LOCK_MS = 1_000
"""How soon a queue whose lock is missing is looked at again."""

PULL_ANSWERS = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    )
)
_UNKNOWN_HERE = frozenset(
    (ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST)
)
"""The broker has not had our last heartbeat, or has forgotten it in a restart."""


class PullAnswer(NamedTuple):
    """A broker's answer to a pull; offsets are 0 where `code` is none of those above."""

    code: int
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    body: bytes
    remark: str | None


def read_pull(request: Request) -> PullAnswer:
    """The answer in place → values; raises HeaderError."""
    code = request.code
    if code not in PULL_ANSWERS:
        return PullAnswer(code, 0, 0, 0, 0, b"", request.remark())
    next_offset = request.i64(b"nextBeginOffset")
    if next_offset < 0:
        raise BodyError(f"a pull is answered with the next offset {next_offset}")
    return PullAnswer(
        code,
        next_offset,
        request.i64_or(b"minOffset", 0),
        request.i64_or(b"maxOffset", 0),
        request.i64_or(b"suggestWhichBrokerId", MASTER_ID),
        request.body() if code == ResponseCode.SUCCESS else b"",
        None,
    )


async def pull(peer: Peer, fields: Mapping[str, str], *, timeout_ms: int) -> PullAnswer:
    """Ask a broker once; raises its refusal."""
    answer = await peer.read(
        RequestCode.PULL_MESSAGE, fields, reader=read_pull, timeout_ms=timeout_ms, encoding=BINARY
    )
    if answer.code not in PULL_ANSWERS:
        raise refusal(answer.code, answer.remark, peer.address)
    return answer


class Troubles:
    """What goes wrong with brokers, said once for all queues there."""

    def __init__(self) -> None:
        self._said: dict[str, set[str]] = {}

    def note(self, work: ProcessQueue, error: PenstockError) -> None:
        said = self._said.setdefault(work.queue.broker_name, set())
        if str(error) not in said and len(said) < TROUBLES_MAX:
            said.add(str(error))
            log.warning(
                "%s: a pull failed and is tried again: %s", queue_text(work.queue), error.remark()
            )

    def clear(self, work: ProcessQueue) -> None:
        if self._said and self._said.pop(work.queue.broker_name, None) is not None:
            log.info("%s: pulls again", queue_text(work.queue))


class Puller:
    """Keeps one queue pulled."""

    def __init__(
        self,
        session: Session,
        group: str,
        work: ProcessQueue,
        *,
        subscription: Callable[[], Subscription],
        received: Callable[[ProcessQueue, list[ReceivedMessage]], None],
        moved: Callable[[ProcessQueue, int], None],
        troubles: Troubles,
        batch: int = PULL_BATCH,
        may_pull: Callable[[ProcessQueue], bool] | None = None,
    ) -> None:
        self._session = session
        self._work = work
        self._subscription = subscription
        self._received = received
        self._moved = moved
        self._may_pull = may_pull
        self._broker_id = MASTER_ID
        self._again_ms = AGAIN_MS
        self._troubles = troubles
        self._full = False
        self._known: Subscription | None = None
        self._tags: frozenset[bytes] | None = None
        queue = work.queue
        # Records of a retry topic say themselves where they belong.
        own = not queue.topic.startswith(RETRY_TOPIC_PREFIX)
        self._topic = session.without_namespace(queue.topic) if own else None
        self._fields = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "maxMsgNums": str(batch),
            "suspendTimeoutMillis": str(SUSPEND_MS),
            "sysFlag": str(PULL_SUSPEND),
            "commitOffset": "0",
            "bname": queue.broker_name,
        }

    async def run(self) -> None:
        """Until the queue is dropped."""
        work, clock = self._work, self._session.clock
        while not work.dropped:
            if work.paused or work.full is not None:
                await self._wait_for_room()
                continue
            if self._may_pull is not None and not self._may_pull(work):
                await pause(clock, LOCK_MS)
                continue
            try:
                answer = await self._pull()
                if not work.dropped:
                    await self._take(answer)
            except PenstockError as error:
                await self._failed(error)

    async def _wait_for_room(self) -> None:
        work = self._work
        if not work.paused:
            work.throttled += 1
            if not self._full:
                self._full = True
                log.warning(
                    "%s: pulling waits for the handlers: %s; counted, and not said again",
                    queue_text(work.queue),
                    work.full,
                )
        await work.room()

    async def _pull(self) -> PullAnswer:
        session, work = self._session, self._work
        name = work.queue.broker_name
        await session.ensure_heartbeat(name)
        address = session.address_of(name, self._broker_id)
        if address is None:
            await session.find_route(work.queue.topic)
            raise NoRoute(f"no address is known of the broker {name!r}")
        work.last_pull_ms = session.clock.now_ms()
        return await pull(session.peer(address), self._pull_fields(), timeout_ms=TIMEOUT_MS)

    def _pull_fields(self) -> Mapping[str, str]:
        work, fields, subscription = self._work, self._fields, self._subscription()
        if subscription is not self._known:
            self._known, self._tags = subscription, subscription.tag_bytes
        fields["queueOffset"] = str(work.next_offset)
        fields["subVersion"] = str(subscription.version)
        fields["expressionType"] = subscription.kind
        return fields

    async def _take(self, answer: PullAnswer) -> None:
        work = self._work
        self._troubles.clear(work)
        self._again_ms = AGAIN_MS
        self._broker_id = answer.suggested_broker_id
        work.end_offset = answer.max_offset
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            log.warning(
                "%s: the broker has nothing at offset %d (%d to %d are there): on to %d",
                queue_text(work.queue),
                work.next_offset,
                answer.min_offset,
                answer.max_offset,
                answer.next_offset,
            )
            if answer.next_offset <= work.next_offset:
                work.drop()
                self._moved(work, answer.next_offset)
                return
        if answer.code != ResponseCode.SUCCESS:
            await self._pass_over(answer.next_offset)
            return
        bad: list[BadRecord] = []
        messages = decode_records(
            answer.body,
            work.queue.broker_name,
            topic=self._topic,
            bad=bad,
            namespace=self._session.options.namespace,
            tags=self._tags,
            received_ms=self._session.clock.now_ms(),
        )
        next_offset = max(answer.next_offset, work.next_offset)
        if bad:
            next_offset = self._beyond(bad, messages, next_offset)
        if messages:
            work.add(messages, next_offset)
            self._received(work, messages)
        else:
            await self._pass_over(next_offset)

    async def _pass_over(self, next_offset: int) -> None:
        """Nothing for us before this offset. An answer that says nothing at all and comes at once
        must not lead to the next one without a pause."""
        work, clock = self._work, self._session.clock
        if next_offset > work.next_offset:
            work.add([], next_offset)
        elif clock.now_ms() - work.last_pull_ms < EMPTY_MS:
            await pause(clock, EMPTY_MS)

    def _beyond(
        self, bad: list[BadRecord], messages: list[ReceivedMessage], next_offset: int
    ) -> int:
        """Report records that can't be read, and say where to pull on.

        Where the rest of an answer can't be told apart the next pull begins right after the last
        message before it, or, if there is none, one offset further: nothing more is passed over.
        """
        work = self._work
        name = queue_text(work.queue)
        for record in bad:
            log.error(
                "%s: a record at offset %s can't be read and is passed over: %s",
                name,
                record.queue_offset if record.skipped else "unknown",
                record.problem,
            )
        if bad[-1].skipped:
            return next_offset
        last = messages[-1].queue_offset if messages else work.next_offset
        return max(last + 1, work.next_offset)

    async def _failed(self, error: PenstockError) -> None:
        work, clock = self._work, self._session.clock
        if error.answer_code == ResponseCode.FLOW_CONTROL:
            await pause(clock, BUSY_MS)
            return
        self._troubles.note(work, error)
        self._broker_id = MASTER_ID
        await pause(clock, self._again_ms)
        self._again_ms = min(2 * self._again_ms, AGAIN_MS_MAX)
        if error.answer_code in _UNKNOWN_HERE and not work.dropped:
            await self._session.send_heartbeats()
