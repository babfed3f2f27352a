"""Pulls in the connection's buffer (codes 11 and 361): the usual ones here, others in PullRequests.

A usual pull has a target (`pull_targets`). It either gets messages that are in memory, which are
copied from the log straight into the output, or waits at the end of its queue. For it no Python
object is made per message, and none per pull that gets messages. Whatever is unusual is not decided
here: `PullRequests` handles the same request from its beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.context import BrokerContext
from penstock.broker.flow_counters import Deliveries
from penstock.broker.pull.pull_message import SUSPEND_MS_MAX, Pull, PullRequests
from penstock.broker.pull.pull_subscription import Wanted
from penstock.broker.pull.pull_targets import PullTarget, PullTargets
from penstock.rpc.answers import Answer, Suspend
from penstock.rpc.router import InPlaceRow
from penstock.store import get
from penstock.store.get import Reader
from penstock.store.put import StoreWriter
from penstock.wire import layout, octets
from penstock.wire.codes import MASTER_ID, PULL_COMMIT_OFFSET, PULL_SUSPEND, RequestCode
from penstock.wire.frame import Request
from penstock.wire.output import Output

if TYPE_CHECKING:
    from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
    from penstock.broker.stats import Stats
    from penstock.config import LiveSettings, Settings
    from penstock.store.store import MessageStore

UNUSUAL, WRITTEN, WAITS = 0, 1, 2
"""What became of a pull: it is not decided, its response is written, or it waits for messages."""
_UNUSUAL, _WRITTEN, _WAITS = UNUSUAL, WRITTEN, WAITS
_FOUND, _NO_MATCHED_MESSAGE = get.FOUND, get.NO_MATCHED_MESSAGE
_OFFSET_OVERFLOW_ONE, _NO_MESSAGE_IN_QUEUE = get.OFFSET_OVERFLOW_ONE, get.NO_MESSAGE_IN_QUEUE
_COMMIT_OFFSET, _SUSPEND = PULL_COMMIT_OFFSET, PULL_SUSPEND
_SUSPEND_MS_MAX = SUSPEND_MS_MAX
_MASTER_ID = MASTER_ID
_SUCCESS = 0
_ONEWAY = 2
_INT_MAX = 0x7FFFFFFF


class SuspendedPull:
    """A pull that waits for messages at the end of its queue: the `retry` of a Suspend."""

    def __init__(
        self,
        handler: PullHandler,
        target: PullTarget,
        deadline_ms: int,
        offset: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> None:
        self.handler: PullHandler = handler
        self.target: PullTarget = target
        self.deadline_ms: int = deadline_ms
        # From where on it reads; moves past messages that are not wanted.
        self.offset: int = offset
        self.count_max: int = count_max
        self.bytes_max: int = bytes_max

    def __call__(self, last: bool) -> Answer:
        """The answer to the pull now, as `Suspend` describes it."""
        return self.handler.answer(self, last)

    def write(self, output: Output, encoding: int, opaque: int) -> int:
        """Write the response if there are messages now. WAITS: add the same Suspend again.
        UNUSUAL: nothing is decided, call it."""
        return self.handler.write_woken(self, output, encoding, opaque)


class PullHandler:
    """Handles pull requests."""

    def __init__(self, context: BrokerContext) -> None:
        self.targets: PullTargets = PullTargets(context)
        self.requests: PullRequests = PullRequests(context, self.targets)
        self._live: LiveSettings = context.settings
        self._store: MessageStore = context.store
        self._writer: StoreWriter = context.store.writer
        self._offsets: ConsumerOffsets = context.offsets
        self._stats: Stats = context.stats
        self._delivered: Deliveries = context.stats.delivered
        # Limits of the settings that they were read from.
        self._settings: Settings | None = None
        self._count_limit: int = 0
        self._bytes_limit: int = 0
        self._long_polling: bool = True
        self._short_polling_ms: int = 0
        # The numbers of the current request; a wait of 0 is none. Valid until the next one.
        self._offset: int = 0
        self._count_max: int = 0
        self._bytes_max: int = 0
        self._wait_ms: int = 0
        self._commit_offset: int = 0
        self._commits: bool = False
        # How many messages suspended pulls got when they were woken.
        self.woken_messages: int = 0

    def rows(self) -> list[InPlaceRow]:
        return [
            InPlaceRow(RequestCode.PULL_MESSAGE, self),
            InPlaceRow(RequestCode.LITE_PULL_MESSAGE, self),
        ]

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Write the messages into the output, or return another answer."""
        flags = request.find(b"sysFlag")
        if flags >= 0 and request.flag & _ONEWAY == 0:
            target = self.targets.find(request, request.number32(flags))
            if target is not None and self._read_numbers(request, request.number32(flags)):
                status = self._serve(target, request, output, now_ms)
                if status == _WRITTEN:
                    return None
                if status == _WAITS:
                    return self._suspend(target, now_ms)
        return self.requests.handle(request, output, client, now_ms)

    def _read_numbers(self, request: Request, flags: int) -> bool:
        """Read the numbers of a pull; False if one is missing or out of range."""
        if self._settings is not self._live.current:
            self._read_settings(self._live.current)
        offset = request.find(b"queueOffset")
        count = request.find(b"maxMsgNums")
        if offset < 0 or count < 0:
            return False
        self._offset = request.number(offset)
        count_max = request.number(count)
        if count_max > _INT_MAX or count_max < -_INT_MAX:
            return False
        self._count_max = max(1, min(count_max, self._count_limit))
        self._bytes_max = self._bytes_limit
        field = request.find(b"maxMsgBytes")
        if field >= 0:
            bytes_max = request.number(field)
            if bytes_max > 0:
                self._bytes_max = min(bytes_max, self._bytes_limit)
        self._wait_ms = 0
        if flags & _SUSPEND:
            field = request.find(b"suspendTimeoutMillis")
            if field >= 0:
                self._wait_ms = min(request.number(field), _SUSPEND_MS_MAX)
            if not self._long_polling:
                self._wait_ms = self._short_polling_ms
        self._commits = flags & _COMMIT_OFFSET != 0
        if self._commits:
            field = request.find(b"commitOffset")
            if field < 0:
                return False
            self._commit_offset = request.number(field)
        return True

    def _read_settings(self, settings: Settings) -> None:
        broker = settings.broker
        self._settings = settings
        self._count_limit = broker.pull_messages_max
        self._bytes_limit = broker.pull_bytes_max
        self._long_polling = broker.long_polling
        self._short_polling_ms = broker.short_polling_ms

    def _serve(self, target: PullTarget, request: Request, output: Output, now_ms: int) -> int:
        """Write the response to a pull, if its messages are in memory."""
        reader = self._store.reader
        status = self._find(reader, target, self._offset, self._count_max, self._bytes_max)
        if status == _FOUND:
            if not self._write(reader, target, output, request.encoding, request.opaque):
                return _UNUSUAL
        elif self._wait_ms <= 0 or not (
            status == _OFFSET_OVERFLOW_ONE or (status == _NO_MESSAGE_IN_QUEUE and self._offset == 0)
        ):
            return _UNUSUAL
        if self._commits:
            self._offsets.commit(
                target.group, target.topic, target.queue_id, self._commit_offset, now_ms
            )
        self._offsets.record_pull(target.group, target.topic, target.queue_id, self._offset)
        return _WRITTEN if status == _FOUND else _WAITS

    def _suspend(self, target: PullTarget, now_ms: int) -> Answer:
        """Let the current pull wait for messages."""
        deadline_ms = now_ms + self._wait_ms
        suspended = SuspendedPull(
            self,
            target,
            deadline_ms,
            self._offset,
            count_max=self._count_max,
            bytes_max=self._bytes_max,
        )
        # Watch now, because a later request of the same read may be a send to this queue.
        if not target.queue.watched:
            self._store.watch(target.queue)
        return Suspend(target.queue, deadline_ms, suspended)

    def write_woken(
        self, suspended: SuspendedPull, output: Output, encoding: int, opaque: int
    ) -> int:
        """`SuspendedPull.write`."""
        target = suspended.target
        if not self.targets.is_current(target):
            return _UNUSUAL
        reader = self._store.reader
        status = self._find(
            reader, target, suspended.offset, suspended.count_max, suspended.bytes_max
        )
        if status == _NO_MATCHED_MESSAGE and reader.next_offset >= reader.max_offset:
            # None of the new messages is wanted: wait for later ones.
            suspended.offset = reader.next_offset
            return _WAITS
        if status == _FOUND and self._write(reader, target, output, encoding, opaque):
            self.woken_messages += reader.count
            return _WRITTEN
        return _UNUSUAL

    def answer(self, suspended: SuspendedPull, last: bool) -> Answer:
        """`SuspendedPull.__call__`."""
        target = suspended.target
        pull = Pull(
            target.group,
            target.topic,
            target.queue,
            suspended.offset,
            suspended.count_max,
            suspended.bytes_max,
            Wanted(target.tag_hashes),
        )
        return self.requests.retry(pull, suspended.deadline_ms, last)

    def _find(
        self, reader: Reader, target: PullTarget, offset: int, count_max: int, bytes_max: int
    ) -> int:
        reader.set_tag_hashes(target.tag_hashes)
        return reader.find(target.queue, offset, count_max, bytes_max, self._writer.confirm_offset)

    def _write(
        self, reader: Reader, target: PullTarget, output: Output, encoding: int, opaque: int
    ) -> bool:
        """Write the found messages as a response and count them; False if they are not in memory.

        So are damaged ones, which are left out: the length of the body is written before it.
        """
        before = output.length
        total = reader.total
        output.begin(encoding, _SUCCESS, opaque)
        output.field_number(b"suggestWhichBrokerId", _MASTER_ID)
        output.field_number(b"nextBeginOffset", reader.next_offset)
        output.field_number(b"minOffset", reader.min_offset)
        output.field_number(b"maxOffset", reader.max_offset)
        output.end(total)
        if not reader.copy_to(output) or reader.total != total:
            output.length = before
            return False
        at = output.length - total
        sys_flag = octets.get_i32(output.view, at + layout.SYS_FLAG_AT)
        stored_ms = octets.get_i64(output.view, at + layout.store_ms_at(sys_flag))
        flow = target.delivered
        if flow is None or flow.dropped:
            flow = target.delivered = self._stats.deliveries_to(target.group, target.topic)
        behind_ms = max(self._writer.store_ms - stored_ms, 0)
        self._delivered.count(flow, reader.count, total, behind_ms)
        return True
