"""A broker whose messages go by a clock that stands still, and whose clients go by the real one.

Clients are real: they wait in real time for messages and say when they asked by their own clock.
So requests that wait do so in real time, whatever the broker's clock does meanwhile.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.broker.broker import Broker
from penstock.broker.context import Parts
from penstock.broker.long_polling import Holds
from penstock.clock import Alarm, Clock, LoopClock
from penstock.config import Live
from penstock.rpc.answers import Answer, ClientId, Hold, Registered
from penstock.rpc.command import Command
from penstock.store.disk import Disk
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import HeartbeatData
from penstock.wire.codes import PERM_READ_WRITE, RETRY_TOPIC_PREFIX, RequestCode, topic_fault

NEVER_MS = 1 << 62
TELL_MS = 3_000
TIMER_AHEAD_MS = 10_000
_BORN = "bornTime"
_POPS = (RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION)


class PatientHolds(Holds):
    """Requests that wait for messages, as long as their clients do."""

    def __init__(self, store: MessageStore, clock: Clock) -> None:
        super().__init__(store)
        self._clock = clock
        self._real = LoopClock()
        self._alarm: Alarm | None = None
        self._alarm_ms = NEVER_MS
        self._expiring = False

    def add(self, client: ClientId, ticket: Any, hold: Hold) -> None:
        wait_ms = max(hold.deadline_ms - self._clock.now_ms(), 0)
        super().add(client, ticket, replace(hold, deadline_ms=self._real.now_ms() + wait_ms))
        self._set_alarm()

    def due(self) -> int:
        """Never, for the server: its clock stands."""
        return super().due() if self._expiring else NEVER_MS

    def tick(self, now_ms: int) -> None:
        """Nothing: see `_expire`."""

    def _expire(self) -> None:
        self._alarm, self._alarm_ms = None, NEVER_MS
        self._expiring = True
        try:
            super().tick(self._real.now_ms())
        finally:
            self._expiring = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        due_ms = super().due()
        if due_ms < self._alarm_ms:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_ms = due_ms
            self._alarm = self._real.wake_at(due_ms, self._expire)


class PatientBroker(Broker):
    """The broker of a test."""

    def __init__(
        self, settings: Live, store: MessageStore, address: str, host: str, now_ms: int, *,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._clock = clock
        super().__init__(settings, store, address, host, now_ms)

    def _build(self, settings: Live, store: MessageStore, address: str, now_ms: int) -> Parts:
        parts = super()._build(settings, store, address, now_ms)
        parts.holds = PatientHolds(store, self._clock)
        return parts

    def handle(self, command: Command) -> Answer:
        if command.code in _POPS and _BORN in command.ext:  # else it comes days late
            command.ext[_BORN] = str(command.now_ms)
        elif command.code == RequestCode.HEART_BEAT:
            return self._welcome(command)
        return super().handle(command)

    def _welcome(self, command: Command) -> Answer:
        """The NameServer knows a group's retry topic before the group hears of itself: consumers
        find it at once then, and not with one of their next looks."""
        topics = self.parts.topics
        new = []
        for consumer in command.body_as(HeartbeatData).consumer_data_set:
            topic = RETRY_TOPIC_PREFIX + consumer.group_name
            if topics.get(topic) is None and topic_fault(topic) is None:
                group = self.parts.groups.find(consumer.group_name, command.now_ms)
                topics.ensure(topic, group.retry_queue_nums, PERM_READ_WRITE, command.now_ms)
                new.append(topic)
        if not new:
            return super().handle(command)
        handle = super().handle
        return Registered(lambda: handle(command), command.now_ms + TELL_MS, tuple(new))

    def next_due(self) -> int:
        """When there is something to do next about messages that were kept for later."""
        due_ms = min(keeper.due() for keeper in self._keepers)
        # The timer looks a minute ahead, and again every second: here it sleeps longer.
        timers = self.parts.timers
        from_ms = timers.near.loaded_to_ms
        for slot_ms, _ in timers.files.wheel.used(from_ms):
            if slot_ms - TIMER_AHEAD_MS > self._clock.now_ms():
                return min(due_ms, slot_ms - TIMER_AHEAD_MS)
            break
        return due_ms


class FleetingDisk(Disk):
    """Files that nobody needs after the test: nothing waits until they are on the disk.

    Without `threads` all work is done at once, in the loop, and the log counts as flushed when
    time passes.
    """

    def __init__(self, *, threads: bool) -> None:
        super().__init__()
        self.threads = threads

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass
