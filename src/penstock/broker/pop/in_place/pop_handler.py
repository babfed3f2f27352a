"""POP_MESSAGE in the connection's buffer: the usual ones.

A usual pop has a target (`pop_targets`) and gets messages of the requested topic that are in
memory. For it no Python object is made per message. Nothing is changed before it is clear that a
pop is a usual one; whatever is not, `Pop` answers from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint, PopCheckpoints
from penstock.broker.pop.in_place.pop_batches import PopBatches
from penstock.broker.pop.in_place.pop_targets import PopTargets, PopTopic, ResolvedPop
from penstock.broker.pop.ordered_pop import GroupQueue
from penstock.broker.pop.pop_queues import SPARSE
from penstock.broker.pop.pop_request import INVISIBLE_MS_MAX, MESSAGES_MAX, MODE_MIN
from penstock.broker.pull.pull_handler import UNUSUAL, WRITTEN
from penstock.errors import HeaderError, PenstockError
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.rpc.command import Command
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import StoreWriter
from penstock.wire.frame import Request
from penstock.wire.output import Output

if TYPE_CHECKING:
    from penstock.broker.context import BrokerContext
    from penstock.broker.pop.pop_message import Pop
    from penstock.broker.pop.pop_polling import PopPolling
    from penstock.broker.pop.pop_queues import PopQueues
    from penstock.broker.pop.revive_log import ReviveLog
    from penstock.broker.replicas.replica_role import ReplicaRole
    from penstock.config import LiveSettings, Settings
    from penstock.store.store import MessageStore

_UNUSUAL, _WRITTEN = UNUSUAL, WRITTEN
_FOUND = get.FOUND
_MESSAGES_MAX = MESSAGES_MAX
_INVISIBLE_MS_MAX = INVISIBLE_MS_MAX
_MODE_MIN = MODE_MIN
_SPARSE = SPARSE
_LATE_MS = 500
_ONEWAY = 2
_INT_MAX = 0x7FFFFFFF
_NO_LIMIT = 1 << 62


class SuspendedPop:
    """A usual pop that waits for messages: the `retry` of a Suspend."""

    def __init__(
        self,
        handler: PopHandler,
        target: ResolvedPop,
        count_max: int,
        invisible_ms: int,
        from_first: bool,
    ) -> None:
        self.handler: PopHandler = handler
        self.target: ResolvedPop = target
        self.count_max: int = count_max
        self.invisible_ms: int = invisible_ms
        self.from_first: bool = from_first
        # The retry of the rules; set by `wrap`.
        self.retry: Callable[[bool], Answer] | None = None

    def wrap(self, answer: Answer) -> Answer:
        """An answer of the rules to this pop: if it waits, it is retried here."""
        if not isinstance(answer, Suspend):
            return answer
        self.retry = answer.retry
        return Suspend(answer.queue, answer.deadline_ms, self, answer.notifications)

    def __call__(self, last: bool) -> Answer:
        """The answer to the pop now, as `Suspend` describes it."""
        assert self.retry is not None
        return self.wrap(self.retry(last))

    def write(self, output: Output, encoding: int, opaque: int) -> int:
        """Write the response if there are messages now. UNUSUAL: nothing is decided, call it."""
        return self.handler.write_woken(self, output, encoding, opaque)


class PopHandler:
    """Handles POP_MESSAGE."""

    def __init__(
        self,
        context: BrokerContext,
        pop: Pop,
        queues: PopQueues,
        polling: PopPolling,
        queues_in_read: set[GroupQueue],
    ) -> None:
        """`pop` answers unusual requests."""
        self._context: BrokerContext = context
        self._role: ReplicaRole = context.role
        self._pop: Pop = pop
        self._queues: PopQueues = queues
        self._polling: PopPolling = polling
        self._queues_in_read: set[GroupQueue] = queues_in_read
        self._revive_log: ReviveLog = pop.revive_log
        self._checkpoints: PopCheckpoints = pop.revive_log.checkpoints
        self._store: MessageStore = context.store
        self._writer: StoreWriter = context.store.writer
        self._targets: PopTargets = PopTargets(context, polling)
        # Limits of the settings that they were read from.
        self._live: LiveSettings = context.settings
        self._settings: Settings | None = None
        self._batches_max: int = 0
        self._bytes_max: int = 0
        self._in_flight_max: int = 0
        # The numbers of the current request, valid until the next one.
        self._count_max: int = 0
        self._invisible_ms: int = 0
        self._from_first: bool = True
        # What it has found.
        self._found: PopBatches = PopBatches()
        # Messages that it leaves in the queues.
        self._rest: int = 0
        # The queue of the revive log for its checkpoints.
        self._revive_queue_id: int = 0

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Write the messages into the output, or return another answer."""
        self._role.refuse_if_stepping_down()
        target = self._usual_target(request, now_ms)
        if target is None:
            return self._resolve(request, client, now_ms)
        if not self._search(target):
            # The rules may wake other pops, so the numbers are taken out before.
            suspended = SuspendedPop(
                self, target, self._count_max, self._invisible_ms, self._from_first
            )
            return suspended.wrap(self._resolve(request, client, now_ms))
        self._pop.set_time(now_ms)
        self._answer(target, output, request.encoding, request.opaque)
        return None

    def write_woken(
        self, suspended: SuspendedPop, output: Output, encoding: int, opaque: int
    ) -> int:
        """`SuspendedPop.write`."""
        target = suspended.target
        if not self._targets.is_current(target):
            return _UNUSUAL
        if self._settings is not self._live.current:
            self._read_settings(self._live.current)
        self._count_max = suspended.count_max
        self._invisible_ms = suspended.invisible_ms
        self._from_first = suspended.from_first
        if not self._search(target):
            return _UNUSUAL
        self._answer(target, output, encoding, opaque)
        return _WRITTEN

    def _answer(self, target: ResolvedPop, output: Output, encoding: int, opaque: int) -> None:
        """Deliver what the search has found."""
        self._queues.count()
        pop_ms = self._deliver(target, self._pop.now())
        self._found.write(
            output, encoding, opaque, pop_ms, self._invisible_ms, self._revive_queue_id, self._rest
        )
        if self._rest > 0:  # last, because other pops use the same fields
            self._polling.wake(target.topic, target.group, target.queue_id)

    def _resolve(self, request: Request, client: int, now_ms: int) -> Answer:
        """Let `Pop` answer, and keep the target if it accepts."""
        command = Command(
            request.code,
            request.ext(),
            client=client,
            now_ms=now_ms,
            flag=request.flag,
            encoding=request.encoding,
        )
        accepted = self._pop.read(command)
        if isinstance(accepted, Reply):
            return accepted
        self._targets.keep(request, accepted)
        return self._pop.serve(accepted)

    # --- the request

    def _usual_target(self, request: Request, now_ms: int) -> ResolvedPop | None:
        """The target of a usual request."""
        if request.flag & _ONEWAY != 0:
            return None
        try:
            target = self._targets.find(request)
            if target is not None and self._read_numbers(request, now_ms):
                return target
        except HeaderError:  # something is not a number
            pass
        return None

    def _read_numbers(self, request: Request, now_ms: int) -> bool:
        """Read the numbers of a pop; False if one is missing or out of range, or it is late."""
        if self._settings is not self._live.current:
            self._read_settings(self._live.current)
        wait = request.find(b"pollTime")
        born = request.find(b"bornTime")
        count = request.find(b"maxMsgNums")
        invisible = request.find(b"invisibleTime")
        mode = request.find(b"initMode")
        if wait < 0 or count < 0 or invisible < 0 or mode < 0:
            return False
        born_ms = 0
        if born >= 0 and request.value_length(born) > 0:
            born_ms = request.number(born)
        if born_ms < 0 or request.number(wait) < 0:
            return False
        if born_ms != 0 and now_ms - born_ms - request.number(wait) > _LATE_MS:
            return False
        count_max = request.number(count)
        if not -_INT_MAX <= count_max <= _MESSAGES_MAX:
            return False
        self._count_max = max(count_max, 1)
        self._invisible_ms = request.number(invisible)
        init_mode = request.number(mode)
        if not -_INT_MAX <= init_mode <= _INT_MAX:
            return False
        self._from_first = init_mode == _MODE_MIN
        return 0 <= self._invisible_ms <= _INVISIBLE_MS_MAX and not request.truth(
            request.find(b"order")
        )

    def _read_settings(self, settings: Settings) -> None:
        broker = settings.broker
        self._settings = settings
        self._batches_max = broker.pop_batches_max
        self._bytes_max = broker.pull_bytes_max
        self._in_flight_max = (
            broker.pop_in_flight_max if broker.pop_in_flight_limited else _NO_LIMIT
        )

    # --- the search

    def _search(self, target: ResolvedPop) -> bool:
        """Read messages, without changing anything; False if the pop is not a usual one."""
        offsets = self._context.offsets
        if (
            offsets.has_resets()
            or self._queues_in_read
            or len(self._checkpoints) >= self._batches_max
        ):
            return False
        self._found.clear()
        self._rest = 0
        self._store.reader.set_tag_hashes(target.tag_hashes)
        first, retries_first = self._queues.next_turn()
        if retries_first and not self._search_retries(target):
            return False
        if not self._search_topic(target.topics[0], target, first):
            return False
        if not retries_first and not self._search_retries(target):
            return False
        return self._found.batch_count > 0

    def _search_retries(self, target: ResolvedPop) -> bool:
        """Search the retry topics: usually nothing has to be read from them."""
        for number in range(1, len(target.topics)):
            if not self._search_topic(target.topics[number], target, 0):
                return False
        return True

    def _search_topic(self, topic: PopTopic, target: ResolvedPop, first: int) -> bool:
        """Search the queues of a topic, beginning with the `first` one."""
        made = self._store.queues.topics.get(topic.name_bytes)
        committed = self._context.offsets.queues(target.group, topic.name)
        if made is None:
            return topic.retry  # else the target is not current
        if topic.retry or target.queue_id < 0:
            if self._from_first and not topic.retry and len(made) * _SPARSE < topic.queues:
                return False
            queue_id = first % topic.queues if topic.queues > 0 else 0
            count = topic.queues
        else:
            queue_id = target.queue_id
            count = 1
        while count > 0:
            queue = made.get(queue_id)
            offset = committed.get(queue_id)
            if offset is None:
                # A group without an offset begins somewhere, unless there is no queue yet.
                if queue is not None or not (topic.retry or self._from_first):
                    return False
            elif queue is not None and not self._look_at(topic, target, queue, offset):
                return False
            queue_id += 1
            if queue_id >= topic.queues:
                queue_id = 0
            count -= 1
        return True

    def _look_at(
        self, topic: PopTopic, target: ResolvedPop, queue: ConsumeQueue, offset: int
    ) -> bool:
        """Read messages of a queue, if there are any; False if the pop is not a usual one."""
        high = queue.visible_max(self._writer.confirm_offset)
        if offset == high:
            return True
        found = self._found
        space = self._bytes_max - found.size
        if (
            found.count >= self._count_max
            or space <= 0
            or self._is_over_limit(topic.name, target.group, queue.queue_id)
        ):
            self._rest += max(high - offset, 0)
            return True
        if topic.retry:  # its messages are rewritten
            return False
        reader = self._store.reader
        count_max = self._count_max - found.count
        status = reader.find(queue, offset, count_max, space, self._writer.confirm_offset)
        if status != _FOUND:
            return False
        self._rest += max(reader.max_offset - reader.next_offset, 0)
        return found.add(reader, queue.queue_id, offset)

    def _is_over_limit(self, topic: str, group: str, queue_id: int) -> bool:
        """Whether a group has too many messages of a queue in flight."""
        if self._in_flight_max == _NO_LIMIT:
            return False
        return self._checkpoints.in_flight_in((topic, group, queue_id)) > self._in_flight_max

    # --- the response

    def _deliver(self, target: ResolvedPop, now_ms: int) -> int:
        """Create the checkpoints and count the messages; returns the pop time.

        Raises the error of the store if no checkpoint can be written.
        """
        self._revive_queue_id = self._revive_log.next_queue()
        pop_ms = self._unused_pop_ms(target, now_ms)
        stats = self._context.stats
        given = 0
        for number in range(self._found.batch_count):
            batch = self._found.batches[number]
            batch.given = False
            key = CheckpointKey(
                target.topic, target.group, batch.queue_id, batch.start_offset, pop_ms
            )
            checkpoint = PopCheckpoint(
                key, self._invisible_ms, self._found.offsets_of(batch), self._revive_queue_id
            )
            checkpoint.log_offset = batch.log_offset
            try:
                self._revive_log.add_checkpoint(checkpoint, now_ms, batch.next_offset)
            except PenstockError:
                if given == 0:
                    raise
                self._rest += batch.count
                continue
            batch.given = True
            given += 1
        for number in range(self._found.batch_count):
            batch = self._found.batches[number]
            if batch.given:
                behind_ms = max(now_ms - batch.stored_ms, 0)
                stats.got(target.group, target.topic, batch.count, batch.length, behind_ms)
                stats.popped(target.group, target.topic)
        return pop_ms

    def _unused_pop_ms(self, target: ResolvedPop, now_ms: int) -> int:
        """A pop time that no open checkpoint with the same queue and start offset has."""
        number = 0
        while number < self._found.batch_count:
            batch = self._found.batches[number]
            key = (target.topic, target.group, batch.queue_id, batch.start_offset, now_ms)
            if self._checkpoints.get(key) is None:
                number += 1
            else:
                now_ms += 1
                number = 0
        return now_ms
