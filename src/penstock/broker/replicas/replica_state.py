"""What a slave notes for the case that it becomes the master: `config/penstock-replica.json`.

| Member | Meaning |
|---|---|
| `slave` | The broker was a slave when the file was written. A master writes `false`. |
| `topicsTo` | The topic table has every topic with messages before this log offset. Others were deleted at the master: their queues do not bring them back. |
| `timerReadMs`, `timerQueueOffset` | The progress of the master's timer (request GET_TIMER_CHECK_POINT). |
| `timerRebuilding` | This broker is a master since, and its timer has not read its queue again: if it is restarted, it needs the progress of the old master once more. |
| `deliveredFrom` | What the master has delivered since the tables were copied is in the log from here on; 0 if that is not known. |
| `masterBegin` | Where the log of the master began when it was last asked; -1 if that is not known. |
| `commits` | Offsets that consumers have committed at this slave and that the master lacks, by `topic@group` and queue id. They are sent to the master when it is back. |
"""  # noqa: E501

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from penstock.broker.replicas.replica_role import OffsetKey
from penstock.errors import StoreDamaged
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, Long

log = logging.getLogger(__name__)


class ReplicaFile(Body):
    """Content of config/penstock-replica.json."""

    slave: bool = False
    topics_to: Long = 0
    timer_read_ms: Long = 0
    timer_queue_offset: Long = 0
    timer_rebuilding: bool = False
    delivered_from: Long = 0
    master_begin: Long = -1
    commits: dict[str, dict[int, Long]] = {}


class ReplicaState:
    """The notes of a slave."""

    FILE: ClassVar[str] = "config/penstock-replica.json"

    def __init__(self) -> None:
        self.dirty = False
        self.content = ReplicaFile()

    def load(self, file: ConfigFile) -> None:
        """Load the file. Without it, more is delivered twice after a change of roles."""
        try:
            found = file.load(lambda data: fastjson.decode(data, ReplicaFile))
        except StoreDamaged as error:
            log.warning("%s", error)
            return
        if found is not None:
            self.content = found

    def update(self, **changes: Any) -> None:
        """Change members; the file is written soon."""
        changes |= {"slave": True, "timer_rebuilding": False}
        content = msgspec.structs.replace(self.content, **changes)
        if content != self.content:
            self.content = content
            self.dirty = True

    def note_commits(self, commits: Mapping[OffsetKey, int]) -> None:
        """These commits are to be sent to the master."""
        noted: dict[str, dict[int, int]] = {}
        for (group, topic, queue_id), offset in commits.items():
            noted.setdefault(f"{topic}@{group}", {})[queue_id] = offset
        self.update(commits=noted)

    def commits(self) -> dict[OffsetKey, int]:
        """The commits that are to be sent to the master."""
        found = {}
        for key, queues in self.content.commits.items():
            topic, _, group = key.rpartition("@")
            for queue_id, offset in queues.items():
                found[group, topic, queue_id] = offset
        return found

    @property
    def takes_over(self) -> bool:
        """Whether a master that starts takes over from another one."""
        return self.content.slave or self.content.timer_rebuilding

    def begin_master(self) -> None:
        """The broker is a master now."""
        noted = self.content
        self.content = ReplicaFile(
            topics_to=noted.topics_to,
            timer_read_ms=noted.timer_read_ms,
            timer_queue_offset=noted.timer_queue_offset,
            timer_rebuilding=True,
            delivered_from=noted.delivered_from,
        )
        self.dirty = True

    def timer_rebuilt(self) -> None:
        """The master has taken over all; what is known about topics stays true."""
        self.content = ReplicaFile(topics_to=self.content.topics_to)
        self.dirty = True

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(self.content)
