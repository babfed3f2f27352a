"""The options of the source: which topics, from where to where, in which pieces.

The names are those of Spark's source for Kafka where there is such an option. Options that a mode
can't use are refused, not ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import BadSetting
from penstock.spark.connection_options import (
    CONNECTION_OPTIONS,
    READ_MS,
    ConnectionOptions,
    OptionReader,
)
from penstock.spark.message_schema import wanted_columns
from penstock.spark.source.queue_offsets import (
    EARLIEST,
    LATEST,
    Assignment,
    QueueOffsets,
    Start,
    listed,
    parse_assignment,
    parse_start,
)
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
_LOG_ONLY: Final = ("path", "checkCrc", "brokerName")

GROUP_PREFIX: Final = "penstock-spark"
TRIGGER_DELAY_MS: Final = 15 * 60_000


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """Which topics are read: by name, by pattern, or certain queues of some."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: Assignment | None = None

    @classmethod
    def of(cls, given: OptionReader, *, needed: bool) -> "TopicSelection":
        """From the options; raises BadSetting."""
        ways = ("subscribe", "subscribePattern", "assign")
        way = given.one_of(ways)
        if way is None:
            if needed:
                raise BadSetting(
                    "no topic is named", hint=f"give one of the options {', '.join(ways)}"
                )
            return cls()
        text = given.text(way)
        assert text is not None
        if way == "assign":
            assigned = parse_assignment(text)
            return cls(names=tuple(assigned), assigned=assigned)
        if way == "subscribePattern":
            try:
                re.compile(text)
            except re.error as error:
                raise BadSetting(
                    f"the option subscribePattern is {text!r}: {error}",
                    hint="give a regular expression of Python's that matches whole names",
                ) from None
            return cls(pattern=text)
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise BadSetting(f"the option subscribe is {text!r}", hint="give names of topics")
        return cls(names=names)

    def include(self, queue: MessageQueue) -> bool:
        """Whether this queue is one to read."""
        if self.assigned is not None:
            brokers = self.assigned.get(queue.topic, {})
            return queue.queue_id in brokers.get(queue.broker_name, ())
        if self.pattern is not None:
            return re.fullmatch(self.pattern, queue.topic) is not None
        return queue.topic in self.names


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All that a reader is told."""

    connection: ConnectionOptions
    topics: TopicSelection
    columns: tuple[str, ...]
    starting: Start
    ending: Start
    tags: str | None
    """As in a subscription, "a || b"; None: all messages."""
    group: str
    """The group that pulls are done for: nothing is stored for it."""
    commit_group: str | None
    fail_on_data_loss: bool
    partitions_min: int | None
    rows_max: int | None
    rows_min: int | None
    trigger_delay_ms: int
    read_timeout_ms: int
    """How long a broker that is away is waited for."""
    log_path: str | None
    """`mode=log`: where the commit-log files are."""
    starting_ms: int | None
    ending_ms: int | None
    check_crc: bool
    broker: str | None
    """`mode=log`: what the column `broker` says, since files do not know."""

    @classmethod
    def of(cls, options: Mapping[str, str], *, stream: bool = False) -> "SourceOptions":
        """From what Spark hands over; raises BadSetting."""
        given = OptionReader(options, (*CONNECTION_OPTIONS, *SOURCE_OPTIONS), what="source")
        is_log = given.choice("mode", ("queue", "log"), default="queue") == "log"
        _check_mode(given, is_log=is_log, stream=stream)
        commit_group = given.text("commitGroup")
        prefix = given.text("groupIdPrefix") or GROUP_PREFIX
        topics = TopicSelection.of(given, needed=not is_log)
        found = cls(
            connection=ConnectionOptions.of(given),
            topics=topics,
            columns=wanted_columns(given.text("columns")),
            starting=_place(given, "starting", default="latest" if stream else "earliest"),
            ending=_place(given, "ending", default="latest"),
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
        """Only the columns, before it is known what is read; raises BadSetting."""
        given = OptionReader(options, (*CONNECTION_OPTIONS, *SOURCE_OPTIONS), what="source")
        return wanted_columns(given.text("columns"))

    def with_columns(self, columns: tuple[str, ...]) -> "SourceOptions":
        """The same for a schema that the user has given."""
        return replace(self, columns=columns)

    def check(self) -> None:
        """Raise BadSetting for options that can't be meant together."""
        rows_max, rows_min = self.rows_max, self.rows_min
        if rows_max is not None and rows_min is not None and rows_min > rows_max:
            raise BadSetting(
                f"minOffsetsPerTrigger is {rows_min}, maxOffsetsPerTrigger only {rows_max}",
                hint="the maximum can't be less than the minimum",
            )
        starting, ending = self.starting_ms, self.ending_ms
        if starting is not None and ending is not None and starting > ending:
            raise BadSetting(
                f"startingTimestamp {self.starting_ms} is after endingTimestamp {self.ending_ms}",
                hint="swap them",
            )
        for name, place in (("startingOffsets", self.starting), ("endingOffsets", self.ending)):
            if isinstance(place, Mapping):
                _check_named(name, place, self.topics)

    def check_batch(self) -> None:
        """Raise BadSetting for what would read nothing at all."""
        for name, place, word, number in (
            ("startingOffsets", self.starting, "latest", LATEST),
            ("endingOffsets", self.ending, "earliest", EARLIEST),
        ):
            named = isinstance(place, Mapping) and number in place.values()
            if place == word or named:
                raise BadSetting(
                    f"{name} of a batch read can't be {number if named else word}: nothing would "
                    "be read",
                    hint="use spark.readStream to begin at the end",
                )


def _check_mode(given: OptionReader, *, is_log: bool, stream: bool) -> None:
    if is_log:
        if stream:
            raise BadSetting(
                "mode=log reads files that are there: it can't be a stream",
                hint="use spark.read, or leave mode out to follow the topics",
            )
        given.refuse(_QUEUE_ONLY, "is not for mode=log, which reads files without a broker")
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


def _place(given: OptionReader, side: str, *, default: str) -> Start:
    """Where to begin or to end: offsets or a moment."""
    way = given.one_of((f"{side}Offsets", f"{side}Timestamp"))
    if way is None:
        return default
    text = given.text(way)
    assert text is not None
    if way.endswith("Timestamp"):
        moment = given.timestamp_ms(way)
        assert moment is not None
        return moment
    return parse_start(text, way)


def _check_named(option: str, offsets: QueueOffsets, topics: TopicSelection) -> None:
    """Offsets of a queue that is not read are a slip of the pen."""
    for queue in sorted(offsets):
        if not topics.include(queue):
            raise BadSetting(
                f"{option} has {listed([queue])}, which is not read",
                hint="name the same topics in subscribe, subscribePattern or assign",
            )
