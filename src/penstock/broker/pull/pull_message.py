"""Pulls: messages of a queue from an offset on, now or when they arrive (codes 11 and 361).

Here are the rules, for all pulls; `pull_handler` handles the usual ones by what was resolved here.

Messages in memory are copied from the log straight into the connection's output. Others are read in
the thread pool. If there are none and the client allows it, the request is suspended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from penstock.broker.context import BrokerContext
from penstock.broker.filter.filtered_read import FilteredReader
from penstock.broker.pull.pull_subscription import (
    FORBIDDEN_BROKER,
    FORBIDDEN_GROUP,
    FORBIDDEN_TOPIC,
    PullForbidden,
    PullSubscriptions,
    SubscriptionError,
    Wanted,
    reader_for,
)
from penstock.broker.pull.pull_suggestion import PullSuggestion
from penstock.broker.pull.pull_targets import PullTargets
from penstock.errors import NoPermission, TopicNotExist
from penstock.rpc.answers import Answer, InThread, Reply, Suspend
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.store.store import GetResult
from penstock.wire import layout, octets
from penstock.wire.codes import (
    MASTER_ID,
    PERM_READ,
    PULL_COMMIT_OFFSET,
    PULL_SUSPEND,
    ResponseCode,
)
from penstock.wire.frame import Request
from penstock.wire.octets import Bytes
from penstock.wire.output import Output

SUSPEND_MS_MAX = 60_000
"""Longest time that a pull is suspended; RocketMQ's clients give up after 30 s."""

_CODES = {
    get.FOUND: ResponseCode.SUCCESS,
    get.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    get.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    get.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    get.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    get.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    get.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
    get.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_NOT_FOUND,
    get.NO_MATCHED_LOGIC_QUEUE: ResponseCode.PULL_NOT_FOUND,
}

_EXAMINED = frozenset((get.NO_MATCHED_MESSAGE, get.MESSAGE_WAS_REMOVING))
"""Queue entries were read, and none of them has a message to deliver."""


@dataclass(frozen=True, slots=True)
class Pull:
    """The fields of a pull request."""

    group: str
    topic: str
    queue: ConsumeQueue
    offset: int
    count_max: int
    bytes_max: int
    wanted: Wanted


class PullRequests:
    """Decides pull requests."""

    def __init__(self, context: BrokerContext, targets: PullTargets) -> None:
        """`targets` gets what is resolved here."""
        self._context = context
        self._targets = targets
        self._store = context.store
        self._subscriptions = PullSubscriptions(context)
        self._suggestion = PullSuggestion(context)
        self._reader: Reader | FilteredReader = context.store.reader  # of the last `_find`

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Write the messages into the output, or return another answer."""
        try:
            pull, wait_ms = self._read(request, client, now_ms)
        except PullForbidden as error:
            return _forbidden(error)
        except SubscriptionError as error:
            return Reply(error.wire_code, _no_offsets(), remark=error.remark())
        reset = self._context.offsets.take_reset(pull.group, pull.topic, pull.queue.queue_id)
        if reset is not None:
            return self._reset(pull, reset)
        status = self._find(pull)
        if status == get.FOUND:
            if self._write(pull, request, output):
                return None
            status = get.COLD
        return self._without_messages(pull, status, now_ms + wait_ms if wait_ms > 0 else 0)

    # --- reading the request

    def _read(self, request: Request, client: int, now_ms: int) -> tuple[Pull, int]:
        context = self._context
        config = context.settings.current.broker
        group = request.text(b"consumerGroup") or ""
        topic = request.text(b"topic") or ""
        flags = request.i32(b"sysFlag")
        queue = self._allowed(group, topic, request.i32(b"queueId"), client, now_ms)
        wanted = self._subscriptions.wanted(request, group, topic, flags)
        if flags & PULL_COMMIT_OFFSET:
            offset = request.i64(b"commitOffset")
            context.offsets.commit(group, topic, queue.queue_id, offset, now_ms)
        wait_ms = 0
        if flags & PULL_SUSPEND:
            wait_ms = request.i64_or(b"suspendTimeoutMillis", 0)
            wait_ms = min(wait_ms, SUSPEND_MS_MAX)
            if not config.long_polling:
                wait_ms = config.short_polling_ms
        bytes_max = config.pull_bytes_max
        asked = request.i64_or(b"maxMsgBytes", 0)
        if asked > 0:
            bytes_max = min(bytes_max, asked)
        pull = Pull(
            group,
            topic,
            queue,
            request.i64(b"queueOffset"),
            max(1, min(request.i32(b"maxMsgNums"), config.pull_messages_max)),
            bytes_max,
            wanted.for_group(topic, group),
        )
        self._targets.keep(request, flags, queue, pull.wanted)
        context.offsets.record_pull(group, topic, queue.queue_id, pull.offset)
        return pull, wait_ms

    def _allowed(
        self, group: str, topic: str, queue_id: int, client: int, now_ms: int
    ) -> ConsumeQueue:
        """The queue, if broker, group and topic may be read; checks in RocketMQ's order."""
        context = self._context
        config = context.settings.current.broker
        if not config.permission & PERM_READ:
            raise PullForbidden(
                f"the broker {config.name} is not readable",
                FORBIDDEN_BROKER,
                "its permission (brokerPermission) does not allow reading",
            )
        known = context.groups.find(group, now_ms, client)
        if not known.consume_enable:
            self._refuse_group(group)
        return self._readable(topic, queue_id)

    def _forbidden_now(self, pull: Pull) -> Reply | None:
        """The refusal of a suspended pull whose group may no longer read."""
        group = self._context.groups.get(pull.group)
        try:
            if group is not None and not group.consume_enable:
                self._refuse_group(pull.group)
            self._readable(pull.topic, pull.queue.queue_id)
        except PullForbidden as error:
            return _forbidden(error)
        return None

    def _refuse_group(self, group: str) -> NoReturn:
        raise PullForbidden(
            f"the group {group} may not consume",
            FORBIDDEN_GROUP,
            "enable it with mqadmin updateSubGroup -s true",
        )

    def _readable(self, topic: str, queue_id: int) -> ConsumeQueue:
        try:
            return self._context.topics.readable_queue(topic, queue_id)
        except NoPermission as error:
            raise PullForbidden(error.message, FORBIDDEN_TOPIC, error.hint) from None

    # --- responding

    def _find(self, pull: Pull) -> int:
        self._reader = reader_for(self._store.reader, pull.wanted)
        return self._reader.find(
            pull.queue, pull.offset, pull.count_max, pull.bytes_max, self._store.confirm_offset
        )

    def _write(self, pull: Pull, request: Request, output: Output) -> bool:
        """Write the found messages as a response; False if they must be read in the pool.

        So must damaged ones, which are left out: the length of the body is written before it.
        """
        reader, suggestion = self._reader, self._suggestion
        before, total = output.length, reader.total
        enabled = suggestion.enabled
        usual = suggestion.usual(pull.group) if enabled else MASTER_ID
        if not self._write_with(usual, request, output):
            return False
        if enabled:
            suggested = suggestion.for_record(pull.group, output.view, output.length - total)
            if suggested != usual:  # write it again: the header comes before the messages
                output.length = before
                if not self._write_with(suggested, request, output):
                    return False
        self._count(pull, reader.count, total, output.view, output.length - total)
        return True

    def _write_with(self, suggested: int, request: Request, output: Output) -> bool:
        reader = self._reader
        before, total = output.length, reader.total
        output.begin(request.encoding, ResponseCode.SUCCESS, request.opaque)
        output.field_number(b"suggestWhichBrokerId", suggested)
        output.field_number(b"nextBeginOffset", reader.next_offset)
        output.field_number(b"minOffset", reader.min_offset)
        output.field_number(b"maxOffset", reader.max_offset)
        output.end(total)
        if not reader.copy_to(output) or reader.total != total:
            output.length = before
            return False
        return True

    def _without_messages(self, pull: Pull, status: int, deadline_ms: int) -> Answer:
        reader = self._reader
        if status == get.COLD:
            return self._read_in_thread(pull)
        found = GetResult(status, reader.next_offset, reader.min_offset, reader.max_offset, 0, b"")
        reply = self._reply(pull, found)
        if reply.code == ResponseCode.PULL_NOT_FOUND and deadline_ms > 0:
            return self._suspend(replace(pull, offset=found.next_offset), deadline_ms)
        self._context.stats.missed()
        return reply

    def _suspend(self, pull: Pull, deadline_ms: int) -> Suspend:
        # Watch now, because a later request of the same read may be a send to this queue.
        self._context.store.watch(pull.queue)
        return Suspend(pull.queue, deadline_ms, lambda last: self.retry(pull, deadline_ms, last))

    def retry(self, pull: Pull, deadline_ms: int, last: bool) -> Answer:
        """The answer to a pull that was suspended, as `Suspend` describes it."""
        if pull.queue.deleted:
            raise TopicNotExist(f"the topic {pull.topic} was deleted")
        forbidden = self._forbidden_now(pull)
        if forbidden is not None:
            return forbidden
        reset = self._context.offsets.take_reset(pull.group, pull.topic, pull.queue.queue_id)
        if reset is not None:
            return self._reset(pull, reset)
        status = self._find(pull)
        if status == get.FOUND:
            return self._reply_found(pull)
        reader = self._reader
        seen_all = reader.next_offset >= reader.max_offset
        if status == get.NO_MATCHED_MESSAGE and seen_all and not last:
            # None of the new messages is wanted: wait for later ones.
            return self._suspend(replace(pull, offset=reader.next_offset), deadline_ms)
        return self._without_messages(pull, status, 0 if last else deadline_ms)

    def _reply_found(self, pull: Pull) -> Answer:
        reader = self._reader
        output = Output(reader.total + 1)
        if not reader.copy_to(output):
            return self._read_in_thread(pull)
        found = GetResult(
            get.FOUND if reader.count else get.MESSAGE_WAS_REMOVING,  # all of them are damaged
            reader.next_offset,
            reader.min_offset,
            reader.max_offset,
            reader.count,
            output.take(),
        )
        return self._reply(pull, found)

    def _read_in_thread(self, pull: Pull) -> InThread:
        store, confirm_offset = self._store, self._store.confirm_offset

        def work() -> GetResult:
            reader = reader_for(store.new_reader(), pull.wanted)
            output = Output(1024)
            # Messages may be deleted by retention between find and copy; the next find skips them.
            # A message that still can't be read is skipped alone, without those after it.
            for count_max in (pull.count_max, pull.count_max, 1):
                status = reader.find(
                    pull.queue, pull.offset, count_max, pull.bytes_max, confirm_offset, True
                )
                if status == get.FOUND and not reader.copy_to(output, True):
                    status = get.MESSAGE_WAS_REMOVING
                if status != get.MESSAGE_WAS_REMOVING:
                    break
            if status == get.FOUND and reader.count == 0:  # all of them are damaged
                status = get.MESSAGE_WAS_REMOVING
            return GetResult(
                status,
                reader.next_offset,
                reader.min_offset,
                reader.max_offset,
                reader.count,
                output.take(),
            )

        return InThread(work, lambda found: self._reply(pull, found))

    def _reply(self, pull: Pull, found: GetResult) -> Reply:
        code = _CODES[found.status]
        if found.status == get.NO_MESSAGE_IN_QUEUE and pull.offset != 0:
            code = ResponseCode.PULL_OFFSET_MOVED
        if found.status == get.FOUND:
            self._count(pull, found.count, len(found.data), found.data, 0)
        suggested = self._suggested(pull, found)
        ext = _offsets(found.next_offset, found.min_offset, found.max_offset, suggested)
        data = found.data if code == ResponseCode.SUCCESS else b""
        return Reply(code, ext, data, get.STATUS_NAMES[found.status])

    def _suggested(self, pull: Pull, found: GetResult) -> int:
        suggestion = self._suggestion
        if not suggestion.enabled:
            return MASTER_ID
        if found.status == get.FOUND:
            return suggestion.for_record(pull.group, found.data, 0)
        if found.status in _EXAMINED and found.next_offset > pull.offset:
            return suggestion.for_entry(pull.group, pull.queue, found.next_offset - 1)
        return suggestion.usual(pull.group)

    def _reset(self, pull: Pull, offset: int) -> Reply:
        queue = pull.queue
        high = queue.visible_max(self._store.confirm_offset)
        usual = self._suggestion.usual(pull.group) if self._suggestion.enabled else MASTER_ID
        ext = _offsets(offset, queue.min_offset, high, usual)
        return Reply(ResponseCode.PULL_OFFSET_MOVED, ext, remark="OFFSET_RESET")

    def _count(self, pull: Pull, count: int, size: int, data: Bytes, at: int) -> None:
        """Count delivered messages; the first record is in `data` at `at`."""
        sys_flag = octets.get_i32(data, at + layout.SYS_FLAG_AT)
        stored_ms = octets.get_i64(data, at + layout.store_ms_at(sys_flag))
        behind_ms = max(self._store.writer.store_ms - stored_ms, 0)
        self._context.stats.got(pull.group, pull.topic, count, size, behind_ms)


def _forbidden(error: PullForbidden) -> Reply:
    ext = {**_no_offsets(), "forbiddenType": str(error.kind)}
    return Reply(error.code, ext, remark=error.remark())


def _offsets(next_offset: int, low: int, high: int, suggested: int) -> dict[str, str]:
    return {
        "suggestWhichBrokerId": str(suggested),
        "nextBeginOffset": str(next_offset),
        "minOffset": str(low),
        "maxOffset": str(high),
    }


def _no_offsets() -> dict[str, str]:
    """Java clients require these fields with every code."""
    return _offsets(0, 0, 0, MASTER_ID)
