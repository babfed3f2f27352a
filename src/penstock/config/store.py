"""The settings of the storage engine."""

from typing import Annotated

from penstock.config.doc import I32_MAX, Checked, Doc

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PERCENT = 100


def delays_ms(levels: str) -> list[int]:
    """The delays of a table such as `1s 5m 2h`, in ms."""
    delays = []
    for level in levels.split():
        if not level[:-1].isdigit() or level[-1] not in _UNIT_MS:
            raise ValueError(f"{level!r} is no delay: a number and s, m, h or d")
        delays.append(int(level[:-1]) * _UNIT_MS[level[-1]])
    if not delays:
        raise ValueError("there must be one level at least")
    return delays


def _hours(text: str) -> None:
    for hour in text.split(";"):
        if hour.strip() and not (hour.strip().isdigit() and int(hour) < 24):
            raise ValueError(f"{hour.strip()!r} is no hour of the day (0 to 23)")


class StoreConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """The storage engine."""

    segment_bytes: Annotated[
        int, Doc("size of one CommitLog file; fixed by the first file", "mappedFileSizeCommitLog",
                 least=1024)
    ] = 1 << 30  # fmt: skip
    queue_file_entries: Annotated[
        int, Doc("entries of one ConsumeQueue file", "mappedFileSizeConsumeQueue", least=1,
                 form="in bytes, 20 for each entry")
    ] = 300_000  # fmt: skip
    index_slots: Annotated[
        int, Doc("hash slots of one IndexFile", "maxHashSlotNum", least=1, most=I32_MAX)
    ] = 5_000_000
    index_entries: Annotated[
        int, Doc("entries of one IndexFile", "maxIndexNum", least=2, most=I32_MAX)
    ] = 20_000_000
    index_enabled: Annotated[
        bool, Doc("whether keys and unique ids are indexed", "messageIndexEnable")
    ] = True
    index_tags: Annotated[
        bool, Doc("whether tags are indexed too, as RocketMQ 5.4 does", live=True)
    ] = True
    delay_levels: Annotated[
        str, Doc("delays of the levels 1, 2, ... of delayed messages (s, m, h, d)",
                 "messageDelayLevel", check=delays_ms)
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"  # fmt: skip
    timers_enabled: Annotated[
        bool, Doc("whether messages may have a time of delivery", "timerWheelEnable", live=True)
    ] = True
    timer_delay_s_max: Annotated[
        int, Doc("how far ahead the time of delivery may be, in seconds", "timerMaxDelaySec",
                 live=True, most=I32_MAX)
    ] = 40 * 86_400  # fmt: skip
    timer_precision_ms: Annotated[
        int, Doc("length of the timer's slots; inside a slot messages are delivered by their own "
                 "millisecond", "timerPrecisionMs", least=100, most=1000)
    ] = 1000  # fmt: skip
    timer_roll_slots: Annotated[
        int, Doc("a message that waits longer is stored again after so many slots, or after half "
                 "of `retain_hours` if that is shorter", "timerRollWindowSlot", live=True, least=60,
                 most=7 * 86_400 - 60)
    ] = 2 * 86_400  # fmt: skip
    timer_flush_ms: Annotated[
        int, Doc("how often the timer's files are written", "timerFlushIntervalMs", live=True,
                 least=1)
    ] = 1000  # fmt: skip
    timer_log_bytes: Annotated[
        int, Doc("size of one file of the timer's log", "mappedFileSizeTimerLog", least=4096)
    ] = 100 * 1024 * 1024  # fmt: skip
    body_bytes_max: Annotated[
        int, Doc("largest message body", "maxMessageSize", live=True, most=I32_MAX)
    ] = 4 * 1024 * 1024
    sync_flush: Annotated[
        bool, Doc("acknowledge only what is on the disk", "flushDiskType",
                  form="`SYNC_FLUSH` or `ASYNC_FLUSH`")
    ] = False  # fmt: skip
    flush_interval_ms: Annotated[
        int, Doc("async flush: how often the log is looked at", "flushIntervalCommitLog", least=1)
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
    queue_rest_ms: Annotated[
        int, Doc("how long a queue is left alone until it lets go of its file (at most twice this)",
                 live=True, least=1)
    ] = 60_000  # fmt: skip
    queues_mapped_max: Annotated[
        int, Doc("queue files that are mapped at the same time; beyond, and beyond half of the "
                 "file handles there are, those not used for longest rest", live=True, least=1)
    ] = 4_096  # fmt: skip
    index_flush_ms: Annotated[int, Doc("how often the index is flushed", live=True)] = 60_000
    append_by: Annotated[
        str, Doc("how records reach the page cache: mapping, pwrite, or auto (pwrite when sync "
                 "flush is on)", choices=("auto", "mapping", "pwrite"))
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
                 "deleteWhen", live=True, check=_hours)
    ] = "04"  # fmt: skip
    disk_clean_percent: Annotated[
        int, Doc("use of the disk from which expired segments are deleted at any hour",
                 "diskMaxUsedSpaceRatio", live=True, most=_PERCENT)
    ] = 75  # fmt: skip
    disk_force_percent: Annotated[
        int, Doc("use of the disk from which the oldest segments are deleted whatever their age",
                 "diskSpaceCleanForciblyRatio", live=True, most=_PERCENT)
    ] = 85  # fmt: skip
    disk_refuse_percent: Annotated[
        int, Doc("use of the disk from which writes are refused until it is below the force mark",
                 "diskSpaceWarningLevelRatio", live=True, most=_PERCENT)
    ] = 90  # fmt: skip
    delete_segments_max: Annotated[
        int, Doc("segments deleted in one round", "deleteFileBatchMax", live=True, least=1)
    ] = 10
