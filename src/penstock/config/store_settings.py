"""The settings of the storage engine."""

from typing import Annotated

from penstock.config.doc import I32_MAX, Checked, Doc

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PERCENT = 100


def delays_ms(levels: str) -> list[int]:
    """The delays of levels such as `1s 5m 2h`, in milliseconds."""
    delays = []
    for level in levels.split():
        if not level[:-1].isdigit() or level[-1] not in _UNIT_MS:
            raise ValueError("must be delays such as 1s 5m 2h, with the unit s, m, h or d")
        delays.append(int(level[:-1]) * _UNIT_MS[level[-1]])
    if not delays:
        raise ValueError("must have at least one level")
    return delays


def _hours(text: str) -> None:
    for hour in text.split(";"):
        if hour.strip() and not (hour.strip().isdigit() and int(hour) < 24):
            raise ValueError("must be hours of the day (0 to 23), separated by ;")


class StoreConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """The settings of the storage engine."""

    segment_bytes: Annotated[
        int, Doc("The size of a CommitLog file. It can't change once the first file exists.",
                 "mappedFileSizeCommitLog", least=1024, most=I32_MAX)
    ] = 1 << 30  # fmt: skip
    queue_file_entries: Annotated[
        int, Doc("The number of entries in a ConsumeQueue file.", "mappedFileSizeConsumeQueue",
                 least=1, form="in bytes, 20 for each entry")
    ] = 300_000  # fmt: skip
    index_slots: Annotated[
        int, Doc("The number of hash slots in an IndexFile.", "maxHashSlotNum", least=1,
                 most=I32_MAX)
    ] = 5_000_000  # fmt: skip
    index_entries: Annotated[
        int, Doc("The number of entries in an IndexFile.", "maxIndexNum", least=2, most=I32_MAX)
    ] = 20_000_000
    index_enabled: Annotated[
        bool, Doc("Index messages by key and by unique id.", "messageIndexEnable")
    ] = True
    index_tags: Annotated[
        bool, Doc("Index messages by tag too, as RocketMQ 5.4 does.", live=True)
    ] = True
    delay_levels: Annotated[
        str, Doc("The delays of the delay levels 1, 2, …, with the unit s, m, h or d.",
                 "messageDelayLevel", check=delays_ms)
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"  # fmt: skip
    timers_enabled: Annotated[
        bool, Doc("Whether producers may send timer messages.", "timerWheelEnable", live=True)
    ] = True
    timer_delay_s_max: Annotated[
        int, Doc("How far ahead the delivery time of a message may be, in seconds.",
                 "timerMaxDelaySec", live=True, most=I32_MAX)
    ] = 40 * 86_400  # fmt: skip
    timer_precision_ms: Annotated[
        int, Doc("The length of a slot of the timer wheel. Within a slot each message is delivered "
                 "at its own millisecond.", "timerPrecisionMs", least=100, most=1000)
    ] = 1000  # fmt: skip
    timer_roll_slots: Annotated[
        int, Doc("A timer message that is due later is stored again after this number of slots, "
                 "or after half of `retain_hours` if that is shorter.",
                 "timerRollWindowSlot", live=True, least=60, most=7 * 86_400 - 60)
    ] = 2 * 86_400  # fmt: skip
    timer_flush_ms: Annotated[
        int, Doc("How often the files of the timer are flushed.", "timerFlushIntervalMs", live=True,
                 least=1)
    ] = 1000  # fmt: skip
    timer_log_bytes: Annotated[
        int, Doc("The size of a file of the timer log.", "mappedFileSizeTimerLog", least=4096)
    ] = 100 * 1024 * 1024
    body_bytes_max: Annotated[
        int, Doc("The maximum size of a message body.", "maxMessageSize", live=True, most=I32_MAX)
    ] = 4 * 1024 * 1024
    sync_flush: Annotated[
        bool, Doc("Acknowledge a message only after it is flushed to disk.", "flushDiskType",
                  form="`SYNC_FLUSH` or `ASYNC_FLUSH`")
    ] = False  # fmt: skip
    flush_interval_ms: Annotated[
        int, Doc("Async flush: how often the CommitLog is checked for data to flush.",
                 "flushIntervalCommitLog", least=1)
    ] = 500  # fmt: skip
    flush_pages_least: Annotated[
        int, Doc("Async flush: the minimum number of 4 KiB pages to flush.",
                 "flushCommitLogLeastPages")
    ] = 4  # fmt: skip
    flush_thorough_ms: Annotated[
        int, Doc("Async flush: everything is flushed at least this often.",
                 "flushCommitLogThoroughInterval")
    ] = 10_000  # fmt: skip
    queue_flush_ms: Annotated[
        int, Doc("How often ConsumeQueues are flushed and the checkpoint is written.",
                 "flushIntervalConsumeQueue", live=True)
    ] = 5_000  # fmt: skip
    queue_rest_ms: Annotated[
        int, Doc("A ConsumeQueue that is unused for this long (at most twice as long) is unmapped.",
                 live=True, least=1)
    ] = 60_000  # fmt: skip
    queues_mapped_max: Annotated[
        int, Doc("The maximum number of mapped ConsumeQueue files: at most half of the mappings "
                 "that the system allows (vm.max_map_count). Beyond it the least recently used are "
                 "unmapped.",
                 live=True, least=1)
    ] = 16_384  # fmt: skip
    index_flush_ms: Annotated[int, Doc("How often the index is flushed.", live=True)] = 60_000
    append_by: Annotated[
        str, Doc("How records are written to the page cache: mapping, pwrite, or auto (pwrite with "
                 "sync flush, mapping otherwise).", choices=("auto", "mapping", "pwrite"))
    ] = "auto"  # fmt: skip
    lock_memory: Annotated[
        bool, Doc("Keep the current CommitLog segment in memory (mlock).", "warmMapedFileEnable")
    ] = False
    hot_bytes: Annotated[
        int, Doc("The size of the newest part of the CommitLog, which is assumed to be in memory "
                 "and is read in the event loop.", live=True)
    ] = 256 * 1024 * 1024  # fmt: skip
    group_readable: Annotated[
        bool, Doc("The files can be read by the group of the broker's system user, for Spark jobs "
                  "that read log files. Others can never read them.")
    ] = False  # fmt: skip
    check_cold_reads: Annotated[
        bool, Doc("Check the CRC of messages that are read from disk or page cache, and deliver no "
                  "damaged ones.", live=True)
    ] = True  # fmt: skip
    scrub_mb_per_s: Annotated[
        int, Doc("Scrub: the rate in MB/s at which the CommitLog is read in the background to "
                 "check its records. 0: no scrub.", live=True, most=10_000)
    ] = 0  # fmt: skip
    scrub_hours: Annotated[
        int, Doc("Scrub: the time from the start of one pass over the CommitLog to the next.",
                 live=True, least=1, most=I32_MAX)
    ] = 168  # fmt: skip
    retain_hours: Annotated[
        int, Doc("Segments older than this may be deleted.", "fileReservedTime", live=True)
    ] = 72
    delete_hours: Annotated[
        str, Doc("The hours of the day in which expired segments are deleted, separated by `;`.",
                 "deleteWhen", live=True, check=_hours)
    ] = "04"  # fmt: skip
    disk_clean_percent: Annotated[
        int, Doc("Disk usage from which expired segments are deleted at any hour.",
                 "diskMaxUsedSpaceRatio", live=True, most=_PERCENT)
    ] = 75  # fmt: skip
    disk_force_percent: Annotated[
        int, Doc("Disk usage from which the oldest segments are deleted regardless of age.",
                 "diskSpaceCleanForciblyRatio", live=True, most=_PERCENT)
    ] = 85  # fmt: skip
    disk_refuse_percent: Annotated[
        int, Doc("Disk usage from which writes are refused, until it falls below "
                 "`disk_force_percent`.", "diskSpaceWarningLevelRatio", live=True, most=_PERCENT)
    ] = 90  # fmt: skip
    delete_segments_max: Annotated[
        int, Doc("The maximum number of segments deleted in one pass.", "deleteFileBatchMax",
                 live=True, least=1)
    ] = 10  # fmt: skip
