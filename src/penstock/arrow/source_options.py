"""The options of a read, with Spark or without: topics, offsets, limits.

The names are those of Spark's Kafka source where it has such an option. Options that do not apply
to a mode are refused, not ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.arrow.connection_options import (
    CONNECTION_OPTIONS,
    READ_MS,
    ConnectionOptions,
    OptionReader,
)
from penstock.arrow.message_schema import wanted_columns
from penstock.arrow.queue_offsets import (
    EARLIEST,
    LATEST,
    Assignment,
    OffsetSpec,
    QueueOffsets,
    format_queues,
    parse_assignment,
    parse_offset_spec,
)
from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue

SOURCE_OPTIONS: Final = (
    "mode",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "failOnDataLoss",
    "groupIdPrefix",
    "commitGroup",
    "tags",
    "columns",
    "readTimeout",
    "path",
    "checkCrc",
    "brokerName",
)
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitGroup",
)
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp")
_QUEUE_ONLY: Final = (
    "assign",
    "startingOffsets",
    "endingOffsets",
    "groupIdPrefix",
    "commitGroup",
    "readTimeout",
    *_STREAM_ONLY,
)
_LOG_ONLY: Final = ("path", "brokerName")

GROUP_PREFIX: Final = "penstock-spark"
TRIGGER_DELAY_MS: Final = 15 * 60_000


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """The topics to read: by name, by pattern, or some of their queues."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Assignment | None = None

    @classmethod
    def of(cls, given: OptionReader, *, needed: bool) -> "TopicSelection":
        """From the options; raises BadSetting."""
        choices = ("subscribe", "subscribePattern", "assign")
        option = given.one_of(choices)
        if option is None:
            if needed:
                raise BadSetting(
                    "no topic is named", hint=f"set one of the options {', '.join(choices)}"
                )
            return cls()
        text = given.text(option)
        assert text is not None
        if option == "assign":
            assigned = parse_assignment(text)
            return cls(names=tuple(assigned), assigned=assigned)
        if option == "subscribePattern":
            try:
                re.compile(text)
            except re.error as error:
                raise BadSetting(
                    f"the option subscribePattern is {text!r}: {error}",
                    hint="set a Python regular expression that matches whole topic names",
                ) from None
            return cls(pattern=text)
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise BadSetting(f"the option subscribe is {text!r}", hint="set topic names")
        return cls(names=names)

    def includes(self, queue: MessageQueue) -> bool:
        """Whether this queue is selected."""
        if self.assigned is not None:
            brokers = self.assigned.get(queue.topic, {})
            return queue.queue_id in brokers.get(queue.broker_name, ())
        if self.pattern is not None:
            return re.fullmatch(self.pattern, queue.topic) is not None
        return queue.topic in self.names


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read, parsed and checked."""

    connection: ConnectionOptions
    topics: TopicSelection
    columns: tuple[str, ...]
    starting: OffsetSpec
    ending: OffsetSpec
    tags: str | None
    """A tag expression such as "a || b"; None: all messages."""
    group: str
    """The group of the pulls; nothing is stored for it."""
    commit_group: str | None
    fail_on_data_loss: bool
    partitions_min: int | None
    rows_max: int | None
    rows_min: int | None
    trigger_delay_ms: int
    read_timeout_ms: int
    """How long to wait for an unavailable broker."""
    log_path: str | None
    """`mode=log`: the path of the commit-log files."""
    starting_ms: int | None
    ending_ms: int | None
    check_crc: bool
    broker: str | None
    """`mode=log`: the value of the column `broker`, which files do not contain."""

    @classmethod
    def of(
        cls, options: Mapping[str, str], *, stream: bool = False, group_prefix: str = GROUP_PREFIX
    ) -> "SourceOptions":
        """From the options as Spark passes them; raises BadSetting."""
        given = OptionReader(options, (*CONNECTION_OPTIONS, *SOURCE_OPTIONS), what="source")
        is_log = given.choice("mode", ("queue", "log"), default="queue") == "log"
        _check_mode(given, is_log=is_log, stream=stream)
        commit_group = given.text("commitGroup")
        prefix = given.text("groupIdPrefix") or group_prefix
        topics = TopicSelection.of(given, needed=not is_log)
        found = cls(
            connection=ConnectionOptions.of(given),
            topics=topics,
            columns=wanted_columns(given.text("columns")),
            starting=_offset_spec(given, "starting", default="latest" if stream else "earliest"),
            ending=_offset_spec(given, "ending", default="latest"),
            tags=given.text("tags"),
            group=commit_group or f"{prefix}-source",
            commit_group=commit_group,
            fail_on_data_loss=given.boolean("failOnDataLoss", default=True),
            partitions_min=given.count("minPartitions"),
            rows_max=given.count("maxOffsetsPerTrigger"),
            rows_min=given.count("minOffsetsPerTrigger"),
            trigger_delay_ms=given.duration_ms("maxTriggerDelay", default=TRIGGER_DELAY_MS),
            read_timeout_ms=given.duration_ms("readTimeout", default=READ_MS),
            log_path=given.text("path") if is_log else None,
            starting_ms=given.timestamp_ms("startingTimestamp"),
            ending_ms=given.timestamp_ms("endingTimestamp"),
            check_crc=given.boolean("checkCrc", default=True),
            broker=given.text("brokerName"),
        )
        found.check()
        if not stream:
            found.check_batch()
        return found

    @staticmethod
    def columns_of(options: Mapping[str, str]) -> tuple[str, ...]:
        """Only the option `columns`, for the schema; raises BadSetting."""
        given = OptionReader(options, (*CONNECTION_OPTIONS, *SOURCE_OPTIONS), what="source")
        return wanted_columns(given.text("columns"))

    def with_columns(self, columns: tuple[str, ...]) -> "SourceOptions":
        """The same options with the columns of the user's schema."""
        return replace(self, columns=columns)

    def check(self) -> None:
        """Raise BadSetting for options that contradict each other."""
        rows_max, rows_min = self.rows_max, self.rows_min
        if rows_max is not None and rows_min is not None and rows_min > rows_max:
            raise BadSetting(
                f"minOffsetsPerTrigger is {rows_min}, but maxOffsetsPerTrigger is {rows_max}",
                hint="the maximum must not be less than the minimum",
            )
        starting, ending = self.starting_ms, self.ending_ms
        if starting is not None and ending is not None and starting > ending:
            raise BadSetting(
                f"startingTimestamp {self.starting_ms} is after endingTimestamp {self.ending_ms}",
                hint="swap them",
            )
        for name, spec in (("startingOffsets", self.starting), ("endingOffsets", self.ending)):
            if isinstance(spec, Mapping):
                _check_selected(name, spec, self.topics)

    def check_batch(self) -> None:
        """Raise BadSetting for options of a batch read that would read nothing."""
        for name, spec, word, number in (
            ("startingOffsets", self.starting, "latest", LATEST),
            ("endingOffsets", self.ending, "earliest", EARLIEST),
        ):
            named = isinstance(spec, Mapping) and number in spec.values()
            if spec == word or named:
                raise BadSetting(
                    f"{name} of a batch read can't be {number if named else word}: nothing would "
                    "be read",
                    hint="a stream (spark.readStream) can start at the end",
                )


def _check_mode(given: OptionReader, *, is_log: bool, stream: bool) -> None:
    if is_log:
        if stream:
            raise BadSetting(
                "mode=log reads existing files: it can't be a stream",
                hint="use spark.read, or leave mode out to stream from brokers",
            )
        given.refuse(_QUEUE_ONLY, "does not apply to mode=log, which reads files without a broker")
        if "path" not in given:
            raise BadSetting(
                "mode=log needs the option path",
                hint="name the store's directory, or its directory commitlog",
            )
        return
    given.refuse(_LOG_ONLY, "is for mode=log only")
    if stream:
        given.refuse(_BATCH_ONLY, "is for batch reads only: a stream has no end")
    else:
        given.refuse(_STREAM_ONLY, "is for streams only")


def _offset_spec(given: OptionReader, side: str, *, default: str) -> OffsetSpec:
    """The start or end of the read: offsets or a timestamp."""
    option = given.one_of((f"{side}Offsets", f"{side}Timestamp"))
    if option is None:
        return default
    text = given.text(option)
    assert text is not None
    if option.endswith("Timestamp"):
        timestamp = given.timestamp_ms(option)
        assert timestamp is not None
        return timestamp
    return parse_offset_spec(text, option)


def _check_selected(option: str, offsets: QueueOffsets, topics: TopicSelection) -> None:
    """Raise BadSetting for offsets of a queue that is not selected: probably a typing error."""
    for queue in sorted(offsets):
        if not topics.includes(queue):
            raise BadSetting(
                f"{option} has {format_queues([queue])}, which is not read",
                hint="name the same topics in subscribe, subscribePattern or assign",
            )
