"""The pull loop of one queue: a pull request waits at the broker for messages, then the next one.

Messages of a response are dispatched at once, so the next pull is in flight while they are handled,
as long as flow control permits. Pulls do not carry committed offsets, though the protocol allows
it: Apache's brokers handle pulls and commits in different threads, and a pull that is overtaken by
the last commit of a consumer would undo it. Responses of the broker:

    0   messages          dispatched, next pull after them
    19  no new message    pull again
    20  no match          pull after the offsets that were looked through
    21  offset moved      forward (messages were deleted): pull there
                          back: the queue is dropped and started again at the broker's offset
    other                 logged once, retried with a back-off of up to three seconds

A response also says from which member of the broker set to pull next. If that one can't be reached,
another one is tried at once: replicas serve consumers while their master is down.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.client.client_session import Session
from penstock.client.consumer.process_queue import ProcessQueue, queue_text
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.client.received_message import BadRecord, ReceivedMessage, decode_records
from penstock.client.topic_routes import MASTER_ID
from penstock.clock import pause
from penstock.errors import BodyError, NoRoute, PeerUnreachable, PenstockError, refusal
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
"""How long the broker may suspend a pull that finds nothing."""
TIMEOUT_MS = 30_000
RETRY_MS = 200
RETRY_MS_MAX = 3_000
FLOW_CONTROL_MS = 20
"""Pause after the response FLOW_CONTROL."""
EMPTY_MS = 100
"""Pause after an empty response that came faster than this."""
LOGGED_FAILURES_MAX = 16
"""Most different failures of one broker that are logged until it responds again."""
LOCK_MS = 1_000
"""Interval of checks for a queue that is not locked."""

PULL_ANSWERS = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    )
)
_NOT_REGISTERED = frozenset(
    (ResponseCode.SUBSCRIPTION_NOT_EXIST, ResponseCode.SUBSCRIPTION_NOT_LATEST)
)
"""The broker has not received our last heartbeat, or has lost it in a restart."""


class PullAnswer(NamedTuple):
    """A broker's response to a pull; the offsets are 0 if `code` is not in PULL_ANSWERS."""

    code: int
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int
    body: bytes
    remark: str | None


def read_pull(request: Request) -> PullAnswer:
    """Decode a response in place; raises HeaderError."""
    code = request.code
    if code not in PULL_ANSWERS:
        return PullAnswer(code, 0, 0, 0, 0, b"", request.remark())
    next_offset = request.i64(b"nextBeginOffset")
    if next_offset < 0:
        raise BodyError(f"the response to a pull has the next offset {next_offset}")
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
    """Send one pull request; raises the broker's refusal."""
    answer = await peer.read(
        RequestCode.PULL_MESSAGE, fields, reader=read_pull, timeout_ms=timeout_ms, encoding=BINARY
    )
    if answer.code not in PULL_ANSWERS:
        raise refusal(answer.code, answer.remark, peer.address)
    return answer


class PullFailures:
    """Logs each failure of a broker once for all its queues, until all of them can be pulled."""

    def __init__(self) -> None:
        self._logged: dict[str, set[str]] = {}  # by broker name
        self._failing: dict[str, set[MessageQueue]] = {}  # by broker name

    def report(self, process_queue: ProcessQueue, error: PenstockError) -> None:
        """A pull has failed: log it, and note it for `explain`."""
        queue = process_queue.queue
        process_queue.pull_failure = error.remark()
        self._failing.setdefault(queue.broker_name, set()).add(queue)
        logged = self._logged.setdefault(queue.broker_name, set())
        if str(error) not in logged and len(logged) < LOGGED_FAILURES_MAX:
            logged.add(str(error))
            log.warning("%s: pull failed, retrying: %s", queue_text(queue), error.remark())

    def clear(self, process_queue: ProcessQueue) -> None:
        """A pull has succeeded."""
        if process_queue.pull_failure is not None and self.forget(process_queue):
            log.info("%s: pulls succeed again", queue_text(process_queue.queue))

    def forget(self, process_queue: ProcessQueue) -> bool:
        """A queue does not fail any more, or is not pulled any more; whether it was the last one of
        its broker that has failed."""
        process_queue.pull_failure = None
        broker = process_queue.queue.broker_name
        failing = self._failing.get(broker, set())
        failing.discard(process_queue.queue)
        if not failing:
            self._failing.pop(broker, None)
            self._logged.pop(broker, None)
        return not failing


class Puller:
    """Pulls one queue."""

    def __init__(
        self,
        session: Session,
        group: str,
        process_queue: ProcessQueue,
        *,
        subscription: Callable[[], Subscription],
        on_messages: Callable[[ProcessQueue, list[ReceivedMessage]], None],
        on_offset_moved: Callable[[ProcessQueue, int], None],
        failures: PullFailures,
        batch: int = PULL_BATCH,
        may_pull: Callable[[ProcessQueue], bool] | None = None,
    ) -> None:
        self._session = session
        self._process_queue = process_queue
        self._subscription = subscription
        self._on_messages = on_messages
        self._on_offset_moved = on_offset_moved
        self._may_pull = may_pull
        self._broker_id = MASTER_ID  # as suggested by the broker's last response
        self._retry_ms = RETRY_MS
        self._failures = failures
        self._throttling_logged = False
        self._last_subscription: Subscription | None = None
        self._tags: frozenset[bytes] | None = None  # of the last subscription
        queue = process_queue.queue
        # Records of a retry topic have their original topic as a property.
        retry = queue.topic.startswith(RETRY_TOPIC_PREFIX)
        self._topic = None if retry else session.without_namespace(queue.topic)
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
        """Pull until the queue is dropped."""
        try:
            while not self._process_queue.dropped:
                await self._pull_once()
        finally:
            self._failures.forget(self._process_queue)

    async def _pull_once(self) -> None:
        """Pull, or wait until that is possible."""
        process_queue, clock = self._process_queue, self._session.clock
        if process_queue.paused or process_queue.full is not None:
            await self._wait()
            return
        if self._may_pull is not None and not self._may_pull(process_queue):
            await pause(clock, LOCK_MS)
            return
        try:
            answer = await self._pull()
            if not process_queue.dropped:
                await self._handle_answer(answer)
        except PenstockError as error:
            await self._handle_failure(error)

    async def _wait(self) -> None:
        process_queue = self._process_queue
        if not process_queue.paused:
            process_queue.throttled += 1
            if not self._throttling_logged:
                self._throttling_logged = True
                log.warning(
                    "%s: pulling pauses until handlers catch up: %s (logged once)",
                    queue_text(process_queue.queue),
                    process_queue.full,
                )
        await process_queue.wait_for_pull()

    async def _pull(self) -> PullAnswer:
        session, process_queue = self._session, self._process_queue
        name = process_queue.queue.broker_name
        await session.ensure_heartbeat(name, self._broker_id)
        address = session.address_of(name, self._broker_id)
        if address is None:
            await session.find_route(process_queue.queue.topic)
            raise NoRoute(f"the address of broker {name!r} is not known")
        try:
            return await self._pull_from(address)
        except PeerUnreachable as unreachable:
            return await self._pull_elsewhere(unreachable, address)

    async def _pull_from(self, address: str) -> PullAnswer:
        session = self._session
        self._process_queue.last_pull_ms = session.clock.now_ms()
        return await pull(session.peer(address), self._pull_fields(), timeout_ms=TIMEOUT_MS)

    async def _pull_elsewhere(self, unreachable: PeerUnreachable, address: str) -> PullAnswer:
        """Pull from another member of the broker set: the route may be out of date, or the master
        is gone. If that fails too, raises why the first one was not reachable."""
        session, queue = self._session, self._process_queue.queue
        try:
            await session.find_route(queue.topic)
        except PenstockError as error:
            log.debug("cannot refresh the route of topic %s: %s", queue.topic, error)
        other = session.other_address(queue.broker_name, address)
        if other is None:
            raise unreachable
        try:
            return await self._pull_from(other)
        except PenstockError as error:
            if error.answer_code in _NOT_REGISTERED:
                raise
            raise unreachable from None

    def _pull_fields(self) -> Mapping[str, str]:
        process_queue, fields, subscription = (
            self._process_queue,
            self._fields,
            self._subscription(),
        )
        if subscription is not self._last_subscription:
            self._last_subscription, self._tags = subscription, subscription.tag_bytes
        fields["queueOffset"] = str(process_queue.next_offset)
        fields["subVersion"] = str(subscription.version)
        fields["expressionType"] = subscription.kind
        return fields

    async def _handle_answer(self, answer: PullAnswer) -> None:
        process_queue = self._process_queue
        self._failures.clear(process_queue)
        self._retry_ms = RETRY_MS
        self._broker_id = answer.suggested_broker_id
        process_queue.end_offset = answer.max_offset
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            log.warning(
                "%s: the broker does not have offset %d (it has %d to %d), continuing at %d",
                queue_text(process_queue.queue),
                process_queue.next_offset,
                answer.min_offset,
                answer.max_offset,
                answer.next_offset,
            )
            if answer.next_offset <= process_queue.next_offset:
                process_queue.drop()
                self._on_offset_moved(process_queue, answer.next_offset)
                return
        if answer.code != ResponseCode.SUCCESS:
            await self._skip_to(answer.next_offset)
            return
        bad: list[BadRecord] = []
        messages = decode_records(
            answer.body,
            process_queue.queue.broker_name,
            topic=self._topic,
            bad=bad,
            namespace=self._session.options.namespace,
            tags=self._tags,
            received_ms=self._session.clock.now_ms(),
            check_crc=self._session.options.check_crc,
        )
        next_offset = max(answer.next_offset, process_queue.next_offset)
        if bad:
            next_offset = self._skip_bad_records(bad, messages, next_offset)
        if messages:
            process_queue.add(messages, next_offset)
            self._on_messages(process_queue, messages)
        else:
            await self._skip_to(next_offset)

    async def _skip_to(self, next_offset: int) -> None:
        """Continue at this offset; there is no message for us before it. An empty response that
        came at once is followed by a pause."""
        process_queue, clock = self._process_queue, self._session.clock
        if next_offset > process_queue.next_offset:
            process_queue.add([], next_offset)
        elif clock.now_ms() - process_queue.last_pull_ms < EMPTY_MS:
            await pause(clock, EMPTY_MS)

    def _skip_bad_records(
        self, bad: list[BadRecord], messages: list[ReceivedMessage], next_offset: int
    ) -> int:
        """Log records that cannot be decoded; returns the offset of the next pull.

        If the rest of the response could not be decoded, the next pull starts after the last
        message before it, or one offset further if there is none. So only one record is skipped.
        """
        process_queue = self._process_queue
        name = queue_text(process_queue.queue)
        for record in bad:
            log.error(
                "%s: skipping the record at offset %s, which cannot be decoded: %s",
                name,
                record.queue_offset if record.skipped else "unknown",
                record.problem,
            )
        if bad[-1].skipped:
            return next_offset
        last = messages[-1].queue_offset if messages else process_queue.next_offset
        return max(last + 1, process_queue.next_offset)

    async def _handle_failure(self, error: PenstockError) -> None:
        process_queue, clock = self._process_queue, self._session.clock
        if error.answer_code == ResponseCode.FLOW_CONTROL:
            await pause(clock, FLOW_CONTROL_MS)
            return
        self._failures.report(process_queue, error)
        self._broker_id = MASTER_ID
        await pause(clock, self._retry_ms)
        self._retry_ms = min(2 * self._retry_ms, RETRY_MS_MAX)
        if error.answer_code in _NOT_REGISTERED and not process_queue.dropped:
            await self._session.send_heartbeats()
