"""A broker that uses a virtual clock for messages and the real clock for its clients.

Clients run in real time: their requests carry the real time and wait in real time for messages. So
suspended requests expire by the real clock.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.long_polling import LongPolling
from penstock.clock import Alarm, Clock, LoopClock
from penstock.config import LiveSettings
from penstock.rpc.answers import Answer, ClientId, RegisterTopics, Suspend
from penstock.rpc.command import Command
from penstock.store.disk import Disk
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import HeartbeatData
from penstock.wire.codes import PERM_READ_WRITE, RETRY_TOPIC_PREFIX, RequestCode, topic_fault

NEVER_MS = 1 << 62
REGISTER_MS = 3_000
TIMER_AHEAD_MS = 10_000
_BORN_TIME = "bornTime"
_POPS = (RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION)


class RealTimeLongPolling(LongPolling):
    """Suspended requests, which expire by the real clock, as their clients expect."""

    def __init__(self, store: MessageStore, clock: Clock) -> None:
        super().__init__(store)
        self._clock = clock
        self._real_clock = LoopClock()
        self._alarm: Alarm | None = None
        self._alarm_ms = NEVER_MS
        self._expiring = False

    def add(self, client: ClientId, pending_response: Any, suspend: Suspend) -> None:
        wait_ms = max(suspend.deadline_ms - self._clock.now_ms(), 0)
        deadline_ms = self._real_clock.now_ms() + wait_ms
        super().add(client, pending_response, replace(suspend, deadline_ms=deadline_ms))
        self._set_alarm()

    def due(self) -> int:
        """Never, for the server, which uses the virtual clock."""
        return super().due() if self._expiring else NEVER_MS

    def tick(self, now_ms: int) -> None:
        """Do nothing: `_expire` is called by the real clock."""

    def _expire(self) -> None:
        self._alarm, self._alarm_ms = None, NEVER_MS
        self._expiring = True
        try:
            super().tick(self._real_clock.now_ms())
        finally:
            self._expiring = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        due_ms = super().due()
        if due_ms < self._alarm_ms:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_ms = due_ms
            self._alarm = self._real_clock.wake_at(due_ms, self._expire)


class VirtualTimeBroker(Broker):
    """A broker with a virtual clock."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        address: str,
        host: str,
        now_ms: int,
        *,
        clock: Clock,
    ) -> None:
        self._clock = clock
        long_polling = RealTimeLongPolling(store, clock)
        super().__init__(settings, store, address, host, now_ms, long_polling=long_polling)

    def handle(self, command: Command) -> Answer:
        # By the virtual clock a request of the real time may be days old, and would be expired.
        if command.code in _POPS and _BORN_TIME in command.ext:
            command.ext[_BORN_TIME] = str(command.now_ms)
        elif command.code == RequestCode.HEART_BEAT:
            return self._register_retry_topics(command)
        return super().handle(command)

    def _register_retry_topics(self, command: Command) -> Answer:
        """Register the retry topics of new groups with the NameServer before the heartbeat is
        answered, so that consumers find them in their first route and not after a refresh."""
        topics = self.context.topics
        new = []
        for consumer in command.body_as(HeartbeatData).consumer_data_set:
            topic = RETRY_TOPIC_PREFIX + consumer.group_name
            if topics.get(topic) is None and topic_fault(topic) is None:
                group = self.context.groups.find(
                    consumer.group_name, command.now_ms, command.client
                )
                topics.ensure(topic, group.retry_queue_nums, PERM_READ_WRITE, command.now_ms)
                new.append(topic)
        if not new:
            return super().handle(command)
        handle = super().handle
        return RegisterTopics(lambda: handle(command), command.now_ms + REGISTER_MS, tuple(new))

    def next_due(self) -> int:
        """When the next message becomes due (delayed, timed, to be retried or checked)."""
        due_ms = min(service.due() for service in self._timed)
        # The timer loads slots a minute ahead, every second. Here it sleeps until a slot is used.
        timers = self.timers
        from_ms = timers.prefetch.loaded_to_ms
        for slot_ms, _ in timers.files.wheel.used(from_ms):
            if slot_ms - TIMER_AHEAD_MS > self._clock.now_ms():
                return min(due_ms, slot_ms - TIMER_AHEAD_MS)
            break
        return due_ms


class UnsyncedDisk(Disk):
    """A disk that never syncs, because the files are not needed after the test.

    Without `threads` all work runs immediately in the event loop, and the CommitLog counts as
    flushed when the clock advances.
    """

    def __init__(self, *, threads: bool) -> None:
        super().__init__()
        self.threads = threads

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass
