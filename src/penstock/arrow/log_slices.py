"""Plans the slices in which the log of a store is read; checks that no file is missing."""

import itertools
import logging
import os
import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.arrow.columns.column_builder import LogFilter, is_user_topic
from penstock.arrow.message_schema import stored_columns
from penstock.arrow.schema_fitting import GROUP_TOPICS
from penstock.arrow.source_options import SourceOptions
from penstock.client.consumer.subscription import split_tags
from penstock.client.namespace import with_namespace
from penstock.errors import BadSetting, DataLost, ReadFailed
from penstock.store.directory import StorePaths
from penstock.store.segment import NAME_DIGITS
from penstock.store.tools.file_pieces import LogFile, read_piece
from penstock.wire import layout, octets
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

log = logging.getLogger(__name__)

TASK_BYTES_MAX: Final = 1024 * 1024 * 1024
"""The most that a task reads, in about 5 s: each task costs Spark 50 to 100 ms."""
TASK_BYTES_MIN: Final = 64 * 1024 * 1024
"""The least that a task reads if there are idle cores."""
TASKS_FEW: Final = 64
"""Up to this number of tasks it is a power of two, so that usually all cores finish together."""
SLICE_BYTES_MIN: Final = 1024 * 1024
BLANK_SPEED: Final = 24
"""How much faster the unwritten end of a log is read than messages: it is only scanned."""
CLOCK_MS: Final = 60_000
"""How far store times may go backwards in a log, if a broker's clock was set."""
_PROBE_BYTES: Final = 64 * 1024
_NO_LIMIT_MS: Final = 2**63 - 1
_LOG_OFFSET_MAX: Final = 2**62
"""A file with a larger number is not a log file; offsets have 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """What to read of a log; Spark pickles it for its workers."""

    columns: tuple[str, ...]
    topics: frozenset[str] | None = None
    """Topics by name; None: all user topics."""
    pattern: str | None = None
    """Topics whose whole name matches this regular expression; instead of `topics`."""
    tags: str | None = None
    """Tags as `a || b`; None: all messages."""
    from_ms: int | None = None
    """Stored at this time or later."""
    until_ms: int | None = None
    """Stored before this time."""
    broker: str | None = None
    """The value of the column `broker`, which files do not contain."""
    check_crc: bool = True
    fail_on_data_loss: bool = True

    @classmethod
    def of(cls, options: SourceOptions) -> "LogSelection":
        """From the options of a read."""
        topics, pattern = _log_topics(options)
        return cls(
            columns=stored_columns(options.columns),
            topics=topics,
            pattern=pattern,
            tags=options.tags,
            from_ms=options.starting_ms,
            until_ms=options.ending_ms,
            broker=options.broker,
            check_crc=options.check_crc,
            fail_on_data_loss=options.fail_on_data_loss,
        )

    def filter(self) -> LogFilter:
        """The filter for the column builder."""
        tags = split_tags(self.tags)
        return LogFilter(
            topics=self._topic_filter(),
            tags=None if tags is None else frozenset(tag.encode() for tag in tags),
            first_ms=self.from_ms or 0,
            until_ms=_NO_LIMIT_MS if self.until_ms is None else self.until_ms,
            check_crc=self.check_crc,
        )

    def _topic_filter(self) -> Callable[[bytes], bool]:
        """Whether a topic is wanted."""
        if self.pattern is not None:
            pattern, prefixes = re.compile(self.pattern), group_topic_prefixes(self.pattern)

            def matches(topic: bytes) -> bool:
                name = topic.decode("utf-8", "replace")
                allowed = is_user_topic(topic) or name.startswith(prefixes)
                return allowed and pattern.fullmatch(name) is not None

            return matches
        if self.topics is not None:
            return frozenset(name.encode() for name in self.topics).__contains__
        return is_user_topic


def _log_topics(options: SourceOptions) -> tuple[frozenset[str] | None, str | None]:
    """Names or pattern of the topics as the log has them, with the namespace."""
    namespace, chosen = options.connection.namespace, options.topics
    if chosen.names:
        return frozenset(with_namespace(namespace, name) for name in chosen.names), None
    if not namespace:
        return None, chosen.pattern
    return None, f"({GROUP_TOPICS})?{re.escape(namespace)}%(?:{chosen.pattern or '.*'})"


def group_topic_prefixes(pattern: str) -> tuple[str, ...]:
    """The prefix of retry or dead-letter topics if the pattern starts with it.

    Other patterns match user topics only, as in reads from brokers.
    """
    known = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)
    return tuple(prefix for prefix in known if pattern.startswith(prefix))


@dataclass(frozen=True, slots=True)
class LogSlice:
    """The records that start in bytes [begin, end) of a file."""

    path: str
    start: int
    """The log offset of the file's first byte."""
    begin: int
    end: int
    next_file: int | None
    """The log offset of the next file; None if the log may end in this one."""
    task: int = 0
    """Slices with the same number are read by one task."""


def plan_scan(path: str, scan: LogSelection, *, tasks_min: int | None = None) -> list[LogSlice]:
    """The slices of a log; `path` is a store's directory, its `commitlog` directory, or one file.

    Tasks get equal shares. Raises BadSetting if there is no log, DataLost if files are missing
    between others.
    """
    files = _used(_files(_local(path)))
    kept = _in_time(files, scan)
    ends = [_data_end(file) for file in kept]
    total = sum(ends)
    blank = sum(file.length for file in kept) - total
    # The driver's cores are not the cluster's, but nothing else is known of it here.
    tasks = max(-(-total // TASK_BYTES_MAX), min(os.cpu_count() or 1, total // TASK_BYTES_MIN), 1)
    if tasks <= TASKS_FEW:
        tasks = 1 << (tasks - 1).bit_length()
    tasks = max(tasks, min(tasks_min or 1, total // SLICE_BYTES_MIN))
    _check_order(files, fail=scan.fail_on_data_loss)
    next_files: dict[int, int | None] = {
        one.start: other.start for one, other in itertools.pairwise(files)
    }
    # The last task reads the unwritten end.
    work = total + min(blank // BLANK_SPEED, total // tasks)
    cuts = [work * number // tasks for number in range(1, tasks)]
    slices = []
    before = 0
    for file, data_end in zip(kept, ends, strict=True):
        # A cut near the edge of a file is moved to the edge.
        inside = [
            cut - before
            for cut in cuts
            if SLICE_BYTES_MIN <= cut - before <= data_end - SLICE_BYTES_MIN
        ]
        for begin, end in itertools.pairwise([0, *inside, file.length]):
            middle = before + (begin + min(end, data_end)) // 2
            next_file = next_files.get(file.start)
            task = bisect(cuts, middle)
            slices.append(LogSlice(str(file.path), file.start, begin, end, next_file, task))
        before += data_end
    return slices


def _local(path: str) -> Path:
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if parts.scheme and "//" in path:
        raise BadSetting(
            f"path: {path} is not a local path", hint="copy or mount the files where workers run"
        )
    return Path(path)


def _files(path: Path) -> list[LogFile]:
    """The commit-log files at a path, in order."""
    folder = StorePaths(path).log if StorePaths(path).log.is_dir() else path
    try:
        files = [
            LogFile(file, int(file.name), length)
            for file in ([folder] if folder.is_file() else _listed(folder))
            if _is_log_name(file.name) and (length := _length(file)) is not None
        ]
    except FileNotFoundError as error:
        raise BadSetting(
            f"path: {error.filename} does not exist",
            hint="give a store's directory, or its directory commitlog",
        ) from None
    except OSError as error:
        raise ReadFailed(f"path: {error.filename} can't be read: {error.strerror}") from error
    if not files and folder is path:
        raise BadSetting(
            f"path: {path} holds no commit log",
            hint="give a store's directory, or its directory commitlog with files such as "
            + "0" * NAME_DIGITS,
        )
    return sorted(files, key=lambda file: file.start)


def _listed(folder: Path) -> list[Path]:
    """The log files of a directory.

    It is listed twice: of two files that a broker creates during a listing, it may contain the
    second and not the first, which would look like a gap.
    """
    last = max((file.name for file in folder.iterdir() if _is_log_name(file.name)), default="")
    return [file for file in folder.iterdir() if file.name <= last]


def _is_log_name(name: str) -> bool:
    return (
        len(name) == NAME_DIGITS
        and name.isascii()
        and name.isdigit()
        and int(name) <= _LOG_OFFSET_MAX
    )


def _length(file: Path) -> int | None:
    """The size of a file; None if retention has just deleted it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def _used(files: list[LogFile]) -> list[LogFile]:
    """The files without preallocated empty ones at the end."""
    while files and not any(read_piece(files[-1].path, 0, layout.BLANK_BYTES)):
        files = files[:-1]
    return files


def _in_time(files: list[LogFile], scan: LogSelection) -> list[LogFile]:
    """The files without those whose messages were all stored too early or too late."""
    if scan.from_ms is None and scan.until_ms is None:
        return files
    from_ms = 0 if scan.from_ms is None else scan.from_ms
    until_ms = _NO_LIMIT_MS if scan.until_ms is None else scan.until_ms
    times = [_first_ms(file) for file in files]
    kept = []
    for file, own_ms, next_ms in zip(files, times, [*times[1:], None], strict=True):
        too_early = next_ms is not None and next_ms < from_ms - CLOCK_MS
        too_late = own_ms is not None and own_ms > until_ms + CLOCK_MS
        if not too_early and not too_late:
            kept.append(file)
    return kept


def _first_ms(file: LogFile) -> int | None:
    """The store time of a file's first record; None if it is unknown."""
    head = read_piece(file.path, 0, layout.FIXED_BYTES)
    magics = (layout.MAGIC_V1, layout.MAGIC_V2)
    if len(head) < layout.FIXED_BYTES or octets.get_i32(head, layout.MAGIC_AT) not in magics:
        return None
    sys_flag = octets.get_i32(head, layout.SYS_FLAG_AT)
    return octets.get_i64(head, layout.store_ms_at(sys_flag))


def _data_end(file: LogFile) -> int:
    """Approximately how far a file is written: only for sharing the work, so zeros in a body do no
    harm."""
    low, high = 0, file.length
    while high - low > SLICE_BYTES_MIN:
        middle = (low + high) // 2
        if any(read_piece(file.path, middle, _PROBE_BYTES)):
            low = middle
        else:
            high = middle
    return high


def _check_order(files: list[LogFile], *, fail: bool) -> None:
    """Report files that are missing between others: retention deletes from the front only.

    A truncated file is found when it is read, which also tells where it ends.
    """
    steps = [other.start - one.start for one, other in itertools.pairwise(files)]
    usual = min([*steps, max((file.length for file in files), default=0)])
    for file, step in zip(files, steps, strict=False):
        length = max(file.length, usual)
        if step <= length:
            continue
        message = (
            f"{file.path.parent}{os.sep}: the files from log offset {file.start + length} to"
            f" {file.start + step - 1} are missing"
        )
        if fail:
            raise DataLost(message)
        log.warning("data loss: %s", message)
