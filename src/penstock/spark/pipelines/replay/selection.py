"""Selects, counts and prepares the rows of a replay.

The functions work on any rows with the columns of the source. `topic`, `body` and the timestamp are
required. Without `broker`, `queue_id` and `queue_offset` rows are ordered by time only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadSetting
from penstock.spark.pipelines.replay.pace import duration_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TIMES: Final = {"store": "store_timestamp", "born": "born_timestamp"}
PROPERTY_PREFIX: Final = "PENSTOCK_REPLAY_"
PROPERTY_RUN: Final = f"{PROPERTY_PREFIX}RUN"
PROPERTY_TOPIC: Final = f"{PROPERTY_PREFIX}TOPIC"
PROPERTY_MESSAGE_ID: Final = f"{PROPERTY_PREFIX}MESSAGE_ID"
PROPERTY_OFFSET: Final = f"{PROPERTY_PREFIX}OFFSET"
"""`broker:queue:offset` of the original."""
PROPERTY_STORED: Final = f"{PROPERTY_PREFIX}STORED"
"""The store time of the original, in milliseconds since 1970."""

TIME: Final = "replay_time"
POSITION: Final = "replay_place"
ORIGIN: Final = "replay_origin"
ORDER: Final = (TIME, "queue_key", POSITION)
"""The order of a replay. Within a queue the time never decreases, so queues keep their order."""
SENT: Final = ("topic", "body", "tags", "keys", "properties", "flag")
_QUEUE: Final = ("broker", "queue_id", "queue_offset")
_DAY_US: Final = 86_400_000_000
GROUPS_MAX: Final = 40
LIMIT_IN_MEMORY: Final = 100_000
SAMPLES: Final = 5
_BODY_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages are replayed; conditions that are not given do not apply."""

    topics: tuple[str, ...] = ()
    from_ms: int | None = None
    until_ms: int | None = None
    """End of the time range, exclusive."""
    by: str = "store"
    """The time of a message: one of `TIMES`."""
    keys: tuple[str, ...] = ()
    """Only messages that have one of these keys."""
    tags: tuple[str, ...] = ()
    where: str | None = None
    """An SQL condition on the columns."""

    def __post_init__(self) -> None:
        if self.by not in TIMES:
            raise BadSetting(f"{self.by!r} is not a time", hint=f"use one of {', '.join(TIMES)}")
        if self.from_ms is not None and self.until_ms is not None and self.from_ms >= self.until_ms:
            raise BadSetting(
                f"the time range from {time_text(self.from_ms)} until "
                f"{time_text(self.until_ms)} is empty",
                hint="the end must be after the start; it is exclusive",
            )

    @property
    def time(self) -> str:
        """The column with the time of a message."""
        return TIMES[self.by]

    def of(self, rows: "DataFrame") -> "DataFrame":
        """The selected rows; raises BadSetting if columns are missing."""
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import functions as f

        needed = ["topic", "body", self.time, *["keys"] * bool(self.keys)]
        _check_columns(rows, [*needed, *["tags"] * bool(self.tags)])
        if self.topics:
            rows = rows.where(f.col("topic").isin(*self.topics))
        if self.from_ms is not None:
            rows = rows.where(f.col(self.time) >= f.timestamp_millis(f.lit(self.from_ms)))
        if self.until_ms is not None:
            rows = rows.where(f.col(self.time) < f.timestamp_millis(f.lit(self.until_ms)))
        if self.keys:
            wanted = f.array(*(f.lit(key) for key in self.keys))
            rows = rows.where(f.arrays_overlap(f.split("keys", " "), wanted))
        if self.tags:
            rows = rows.where(f.col("tags").isin(*self.tags))
        if self.where is not None:
            try:
                rows = rows.where(self.where)
            except (AnalysisException, ParseException) as error:
                reason = str(error).strip().partition("\n")[0]
                raise BadSetting(
                    f"the condition {self.where!r} is not valid: {reason}",
                    hint=f"use an SQL condition on {', '.join(rows.columns)}",
                ) from error
        return rows


def _check_columns(rows: "DataFrame", needed: Sequence[str]) -> None:
    for name in needed:
        if name not in rows.columns:
            raise BadSetting(
                f"the rows have no column {name!r}; they have {', '.join(rows.columns)}",
                hint="a lake must have been written with this column; rows that were written with "
                "--schema can be replayed from Python after to_json",
            )


def outgoing_rows(
    rows: "DataFrame", *, run: str, target: str | None, by: str = "store", limit: int | None = None
) -> "DataFrame":
    """The rows to send, with the columns of the sink and of `ORDER`.

    Properties of the replay are added. Without `target` each row is sent to its own topic. Delays
    are not repeated.
    """
    from pyspark.sql import functions as f

    columns = set(rows.columns)
    prepared = _with_order(rows, by).select(
        f.lit(target).alias("topic") if target is not None else f.col("topic"),
        f.col("topic").alias(ORIGIN),
        *(name for name in SENT if name in columns - {"topic", "properties"}),
        _properties(columns, run).alias("properties"),
        *ORDER,
    )
    return prepared.orderBy(*ORDER) if limit is None else _first(prepared, limit)


def first_rows(rows: "DataFrame", limit: int, *, by: str = "store") -> "DataFrame":
    """The rows that `outgoing_rows` sends with the same limit, unchanged."""
    return _first(_with_order(rows, by), limit).select(*rows.columns)


def _first(ordered: "DataFrame", limit: int) -> "DataFrame":
    """The first rows. Spark keeps a limit in memory; numbering uses one task and disk instead."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    if limit <= LIMIT_IN_MEMORY:
        return ordered.orderBy(*ORDER).limit(limit)
    number = f.row_number().over(Window.orderBy(*ORDER))
    numbered = ordered.withColumn("replay_number", number).where(f.col("replay_number") <= limit)
    return numbered.drop("replay_number").orderBy(*ORDER)


def _with_order(rows: "DataFrame", by: str) -> "DataFrame":
    """The rows with the columns of `ORDER`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    has_queue = set(rows.columns).issuperset(_QUEUE)
    position = f.col("queue_offset") if has_queue else f.lit(0).cast("bigint")
    key = f.concat_ws("|", "topic", "broker", "queue_id") if has_queue else f.lit(None)
    ordered = rows.withColumns(
        {"queue_key": key.cast("string"), POSITION: position, TIME: f.col(TIMES[by])}
    )
    if not has_queue:
        return ordered
    so_far = Window.partitionBy("queue_key").orderBy(POSITION)
    return ordered.withColumn(TIME, f.max(TIME).over(so_far))


def check_times(missing: int) -> None:
    """Raise BadSetting if rows have no time."""
    if missing:
        raise BadSetting(
            f"{missing:,} rows have no timestamp",
            hint="exclude them by a condition: store_timestamp IS NOT NULL",
        )


def _properties(columns: set[str], run: str) -> "Column":
    """The properties of the original with those of this replay, without those of earlier ones."""
    from pyspark.sql import functions as f

    added = {PROPERTY_RUN: f.lit(run), PROPERTY_TOPIC: f.col("topic")}
    if "message_id" in columns:
        added[PROPERTY_MESSAGE_ID] = f.col("message_id")
    if columns.issuperset(_QUEUE):
        broker = f.coalesce("broker", f.lit(""))
        added[PROPERTY_OFFSET] = f.concat_ws(":", broker, "queue_id", "queue_offset")
    if "store_timestamp" in columns:
        added[PROPERTY_STORED] = f.unix_millis("store_timestamp").cast("string")
    pairs = [part for name, value in added.items() for part in (f.lit(name), value)]
    added_map = f.map_filter(f.create_map(*pairs), lambda _, value: value.isNotNull())
    if "properties" not in columns:
        return added_map
    kept = f.map_filter("properties", lambda name, _: ~name.startswith(PROPERTY_PREFIX))
    empty = f.expr("cast(map() as map<string,string>)")
    return f.map_concat(f.coalesce(kept, empty), added_map)


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """The number of messages of one topic, date and tag."""

    topic: str
    date: str
    tags: str | None
    rows: int

    def __str__(self) -> str:
        return f"{self.topic}  {self.date}  {self.tags or '(no tag)'}  {self.rows:,} rows"


@dataclass(frozen=True, slots=True)
class Survey:
    """A summary of the selected messages."""

    rows: int
    bytes: int
    first_ms: int
    last_ms: int
    topics: tuple[str, ...]
    groups: tuple[MessageGroup, ...]
    """The largest groups, up to `GROUPS_MAX`."""
    groups_count: int
    samples: tuple[str, ...]
    """The first messages, one line each."""

    @property
    def span(self) -> str:
        """The number, size and time range of the messages."""
        return (
            f"{self.rows:,} messages, {self.bytes:,} bytes, from {time_text(self.first_ms)} to "
            f"{time_text(self.last_ms)} ({duration_text(self.last_ms - self.first_ms)})"
        )

    def lines(self) -> list[str]:
        """The summary as lines of text."""
        lines = [self.span, *(f"  {group}" for group in self.groups)]
        if self.groups_count > len(self.groups):
            lines.append(f"  and {self.groups_count - len(self.groups):,} smaller groups")
        return [*lines, "the first messages:", *(f"  {line}" for line in self.samples)]


def survey(rows: "DataFrame", by: str = "store") -> Survey | None:
    """Summarize rows with the columns of the source; None if there are none."""
    from pyspark.sql import functions as f

    time = TIMES[by]
    tags = f.col("tags") if "tags" in rows.columns else f.lit(None).cast("string")
    # Arithmetic instead of to_date(), which uses the time zone of the session.
    date = f.expr(f"date_from_unix_date(cast(unix_micros({time}) div {_DAY_US} as int))")
    grouped = (
        rows.groupBy("topic", date.cast("string").alias("date"), tags.alias("tags"))
        .agg(
            f.count(f.lit(1)).alias("rows"),
            f.sum(f.octet_length("body")).alias("bytes"),
            f.unix_millis(f.min(time)).alias("first"),
            f.unix_millis(f.max(time)).alias("last"),
            f.count_if(f.col(time).isNull()).alias("without_time"),
        )
        .persist()
    )
    try:
        whole = grouped.agg(
            f.sum("rows"),
            f.sum("bytes"),
            f.min("first"),
            f.max("last"),
            f.count(f.lit(1)),
            f.sort_array(f.collect_set("topic")),
            f.sum("without_time"),
        ).first()
        if whole is None or not whole[0]:
            return None
        check_times(whole[6])
        largest = grouped.orderBy(f.desc("rows"), "topic", "date", "tags").limit(GROUPS_MAX)
        groups = sorted(largest.collect(), key=lambda row: (row["topic"], row["date"]))
    finally:
        grouped.unpersist()
    return Survey(
        rows=whole[0],
        bytes=whole[1] or 0,
        first_ms=whole[2],
        last_ms=whole[3],
        topics=tuple(whole[5]),
        groups_count=whole[4],
        groups=tuple(MessageGroup(g["topic"], g["date"], g["tags"], g["rows"]) for g in groups),
        samples=tuple(_samples(rows, time)),
    )


def _samples(rows: "DataFrame", time: str) -> list[str]:
    from pyspark.sql import functions as f

    columns = ("topic", *_QUEUE, "message_id", "tags", "keys")
    shown = [name for name in columns if name in rows.columns]
    order = [name for name in (time, *_QUEUE) if name in rows.columns]
    head = f.substring("body", 1, _BODY_CHARS).alias("head")
    first = rows.orderBy(*order).limit(SAMPLES)
    found = first.select(f.unix_millis(time).alias("ms"), head, *shown).collect()
    return [_sample(row.asDict(), shown) for row in found]


def _sample(row: dict[str, Any], shown: Sequence[str]) -> str:
    head = row["head"]
    text = bytes(head).decode(errors="replace") if isinstance(head, bytes | bytearray) else head
    fields = [f"{name}={row[name]}" for name in shown if row[name] is not None]
    return " ".join([time_text(row["ms"]), *fields, f"body={text!r}"])


def time_text(ms: int) -> str:
    """A time as text, in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
