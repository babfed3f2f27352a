"""What a controller knows of the keys in etcd: states of broker sets, reports of living replicas.

A watch keeps it up to date, so it is usually a few milliseconds old, and older while the watch is
interrupted. It says where to look: decisions read the keys again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from penstock.controller.broker_set import BrokerSet, LiveReplica, decode_broker_set
from penstock.errors import StoreDamaged
from penstock.server.controller.etcd.etcd_keys import Keys, ReportKey
from penstock.server.controller.etcd.etcd_messages import KeyValue
from penstock.server.controller.living_replicas import ReplicaKey

log = logging.getLogger(__name__)


class LiveValue(msgspec.Struct, frozen=True):
    """The value of a report."""

    epoch: int = 0
    max_offset: int = 0
    confirm_offset: int = 0
    priority: int = LiveReplica().priority
    complete: bool = True
    takes_over: bool = False
    connection: int = 0
    """The controller's connection to the replica."""

    @property
    def live(self) -> LiveReplica:
        return LiveReplica(
            self.epoch,
            self.max_offset,
            self.confirm_offset,
            self.priority,
            self.complete,
            self.takes_over,
        )

    @classmethod
    def of(cls, live: LiveReplica, connection: int) -> LiveValue:
        return cls(
            live.epoch,
            live.max_offset,
            live.confirm_offset,
            live.priority,
            live.complete,
            live.takes_over,
            connection,
        )


class LivenessReport(NamedTuple):
    """A controller says that a replica is alive."""

    value: LiveValue
    mod_revision: int


class View:
    """The last known keys."""

    def __init__(self, keys: Keys, own: int) -> None:
        """`own` is the number of this controller."""
        self._keys = keys
        self._own = own
        self.states: dict[str, tuple[int, BrokerSet]] = {}
        """By broker name, with the revision of the key."""
        self.own_reports: dict[ReplicaKey, LivenessReport] = {}
        self.reports: dict[ReplicaKey, dict[int, LivenessReport]] = {}
        """Those of other controllers, by their numbers."""
        self.gone: asyncio.Queue[ReplicaKey] = asyncio.Queue()
        """Replicas whose last report by another controller was deleted, while the watch was not
        interrupted."""
        self.interruptions = 0
        """How often changes may have been missed, or came late."""
        self.revision = 0
        """All changes up to this revision are here."""
        self.tick_revision = 0
        """When the own key of this controller was written last."""

    def reset(self, found: Iterable[KeyValue], revision: int) -> None:
        """Replace everything by what there is at a revision."""
        self.interruptions += 1
        self.states, self.reports, self.own_reports = {}, {}, {}
        self.revision = revision
        for kv in found:
            self._take(kv)

    def changed(self, kv: KeyValue) -> None:
        """The watch reports that a key was written."""
        self.revision = max(self.revision, kv.mod_revision)
        self._take(kv)

    def deleted(self, kv: KeyValue, *, late: bool = False) -> None:
        """The watch reports that a key was deleted; `late`: it was interrupted then."""
        self.revision = max(self.revision, kv.mod_revision)
        name = self._keys.set_of(kv.key)
        if name is not None:
            self.forget_state(name, kv.mod_revision)
            return
        report = self._keys.report_of(kv.key)
        if report is not None:
            self.forget_report(report, kv.mod_revision, late=late)

    def learn(self, kv: KeyValue) -> None:
        """This controller has read or written a key; the watch may report it later."""
        if kv.mod_revision > self.revision:
            self._take(kv)

    def forget_state(self, name: str, revision: int) -> None:
        """A state was deleted at this revision."""
        known = self.states.get(name)
        if known is not None and known[0] < revision:
            del self.states[name]

    def forget_report(self, key: ReportKey, revision: int, *, late: bool = False) -> None:
        """A report was deleted at this revision."""
        reports = self._reports_like(key)
        found = reports.get(key.controller)
        if found is None or found.mod_revision >= revision:
            return
        if key.controller == self._own:
            del self.own_reports[key.replica]
            return
        del reports[key.controller]
        if not reports:
            del self.reports[key.replica]
            if not late:
                self.gone.put_nowait(key.replica)

    def forget_replica(self, replica: ReplicaKey, revision: int) -> None:
        """All reports about a replica were deleted at this revision."""
        for number in (self._own, *self.reports.get(replica, ())):
            self.forget_report(ReportKey(replica, number), revision)

    def _reports_like(self, key: ReportKey) -> dict[int, LivenessReport]:
        if key.controller == self._own:
            own = self.own_reports.get(key.replica)
            return {} if own is None else {self._own: own}
        return self.reports.get(key.replica, {})

    def _take(self, kv: KeyValue) -> None:
        name = self._keys.set_of(kv.key)
        if name is not None:
            known = self.states.get(name)
            if known is None or known[0] < kv.mod_revision:
                self._take_state(name, kv)
            return
        key = self._keys.report_of(kv.key)
        if key is not None:
            found = self._reports_like(key).get(key.controller)
            if found is None or found.mod_revision < kv.mod_revision:
                self._take_report(key, LivenessReport(live_value(kv), kv.mod_revision))
        elif kv.key == self._keys.controller(self._own):
            self.tick_revision = max(self.tick_revision, kv.mod_revision)

    def _take_state(self, name: str, kv: KeyValue) -> None:
        try:
            self.states[name] = kv.mod_revision, decode_broker_set(kv.value)
        except StoreDamaged as error:  # the others must be served
            log.error("the state of %s in etcd can't be used: %s", name, error)

    def _take_report(self, key: ReportKey, report: LivenessReport) -> None:
        if key.controller == self._own:
            self.own_reports[key.replica] = report
        else:
            self.reports.setdefault(key.replica, {})[key.controller] = report


def live_value(kv: KeyValue) -> LiveValue:
    """What a report says; a damaged one says that the replica is alive."""
    try:
        return msgspec.json.decode(kv.value, type=LiveValue)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LiveValue()
