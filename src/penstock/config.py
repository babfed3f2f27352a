"""Settings: frozen structs whose every field has a default, a unit in its name and a line of text.

`live` fields may be changed while a server runs; the others are fixed when it starts.
"""

from typing import Annotated, get_type_hints

import msgspec


class Doc(msgspec.Struct, frozen=True):
    """What a setting means, and its name in RocketMQ's broker.conf where it has one."""

    text: str
    apache: str | None = None
    live: bool = False


_POSITIVE = {"queue_file_entries", "index_slots", "flush_interval_ms", "delete_segments_max"}


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The storage engine."""

    segment_bytes: Annotated[
        int, Doc("size of one CommitLog file; fixed by the first file", "mappedFileSizeCommitLog")
    ] = 1 << 30
    queue_file_entries: Annotated[
        int, Doc("entries of one ConsumeQueue file", "mappedFileSizeConsumeQueue (bytes)")
    ] = 300_000
    index_slots: Annotated[int, Doc("hash slots of one IndexFile", "maxHashSlotNum")] = 5_000_000
    index_entries: Annotated[int, Doc("entries of one IndexFile", "maxIndexNum")] = 20_000_000
    index_enabled: Annotated[
        bool, Doc("whether keys and unique ids are indexed", "messageIndexEnable")
    ] = True
    index_tags: Annotated[
        bool, Doc("whether tags are indexed too, as RocketMQ 5.4 does", live=True)
    ] = True
    delay_levels: Annotated[
        str, Doc("delays of the levels 1, 2, ... of delayed messages (s, m, h, d)",
                 "messageDelayLevel")
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"  # fmt: skip
    body_bytes_max: Annotated[int, Doc("largest message body", "maxMessageSize", live=True)] = (
        4 * 1024 * 1024
    )
    sync_flush: Annotated[
        bool, Doc("acknowledge only what is on the disk", "flushDiskType=SYNC_FLUSH")
    ] = False
    flush_interval_ms: Annotated[
        int, Doc("async flush: how often the log is looked at", "flushIntervalCommitLog")
    ] = 500
    flush_pages_least: Annotated[
        int, Doc("async flush: 4 KiB pages below which a look does nothing",
                 "flushCommitLogLeastPages")
    ] = 4  # fmt: skip
    flush_thorough_ms: Annotated[
        int, Doc("async flush: after this long everything is flushed",
                 "flushCommitLogThoroughInterval")
    ] = 10_000  # fmt: skip
    queue_flush_ms: Annotated[
        int, Doc("how often queues are flushed and the checkpoint is written",
                 "flushIntervalConsumeQueue", live=True)
    ] = 5_000  # fmt: skip
    index_flush_ms: Annotated[int, Doc("how often the index is flushed", live=True)] = 60_000
    append_by: Annotated[
        str, Doc("how records reach the page cache: mapping, pwrite, or auto (pwrite when sync "
                 "flush is on)")
    ] = "auto"  # fmt: skip
    lock_memory: Annotated[
        bool, Doc("keep the segment being written in memory (mlock)", "warmMapedFileEnable")
    ] = False
    hot_bytes: Annotated[
        int, Doc("newest part of the log that is read from memory without asking", live=True)
    ] = 256 * 1024 * 1024
    retain_hours: Annotated[
        int, Doc("whole segments older than this may be deleted", "fileReservedTime", live=True)
    ] = 72
    delete_hours: Annotated[
        str, Doc("hours of the day when expired segments are deleted, separated by ;",
                 "deleteWhen", live=True)
    ] = "04"  # fmt: skip
    disk_clean_percent: Annotated[
        int, Doc("use of the disk from which expired segments are deleted at any hour",
                 "diskMaxUsedSpaceRatio", live=True)
    ] = 75  # fmt: skip
    disk_force_percent: Annotated[
        int, Doc("use of the disk from which the oldest segments are deleted whatever their age",
                 "diskSpaceCleanForciblyRatio", live=True)
    ] = 85  # fmt: skip
    disk_refuse_percent: Annotated[
        int, Doc("use of the disk from which writes are refused until it is below the force mark",
                 "diskSpaceWarningLevelRatio", live=True)
    ] = 90  # fmt: skip
    delete_segments_max: Annotated[
        int, Doc("segments deleted in one round", "deleteFileBatchMax", live=True)
    ] = 10

    def __post_init__(self) -> None:
        least = {"segment_bytes": 1024, "index_entries": 2}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            low = least.get(name, 1 if name in _POSITIVE else 0)
            if isinstance(value, int) and value < low:
                raise ValueError(f"{name} can't be {value}: it is at least {low}")
        if self.append_by not in ("auto", "mapping", "pwrite"):
            raise ValueError(f"append_by can't be {self.append_by!r}: auto, mapping or pwrite")
        delays_ms(self.delay_levels)


_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def delays_ms(levels: str) -> list[int]:
    """The delays of a table such as `1s 5m 2h`, in ms."""
    delays = []
    for level in levels.split():
        if not level[:-1].isdigit() or level[-1] not in _UNIT_MS:
            raise ValueError(f"{level!r} is no delay: a number and s, m, h or d")
        delays.append(int(level[:-1]) * _UNIT_MS[level[-1]])
    return delays


def describe(config: type[msgspec.Struct]) -> list[tuple[str, object, Doc]]:
    """(name, default, doc) of each setting, for reference pages."""
    hints = get_type_hints(config, include_extras=True)
    return [
        (field.name, field.default, hints[field.name].__metadata__[0])
        for field in msgspec.structs.fields(config)
    ]
