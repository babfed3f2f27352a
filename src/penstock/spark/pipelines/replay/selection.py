"""The rows of a replay, as functions on DataFrames: which are chosen, what they are, what is sent.

They work on rows with the source's columns, wherever those come from. `topic`, `body` and the time
that counts are needed. Without `broker`, `queue_id` and `queue_offset` nothing is known of queues,
and the order is that of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadSetting
from penstock.spark.pipelines.replay.pace import time_text

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TIMES: Final = {"store": "store_timestamp", "born": "born_timestamp"}
MARK: Final = "PENSTOCK_REPLAY_"
PROPERTY_RUN: Final = f"{MARK}RUN"
PROPERTY_TOPIC: Final = f"{MARK}TOPIC"
PROPERTY_MESSAGE_ID: Final = f"{MARK}MESSAGE_ID"
PROPERTY_OFFSET: Final = f"{MARK}OFFSET"
"""`broker:queue:offset` of the original."""
PROPERTY_STORED: Final = f"{MARK}STORED"
"""When the original was stored, in milliseconds since 1970."""

TIME: Final = "replay_time"
PLACE: Final = "replay_place"
ORIGIN: Final = "replay_origin"
ORDER: Final = (TIME, "queue_key", PLACE)
"""The order of a whole replay. Times never go back within a queue, so it is a queue's order too."""
SENT: Final = ("topic", "body", "tags", "keys", "properties", "flag")
_QUEUE: Final = ("broker", "queue_id", "queue_offset")
_DAY_US: Final = 86_400_000_000
GROUPS_MAX: Final = 40
LIMIT_IN_MEMORY: Final = 100_000
SAMPLES: Final = 5
_BODY_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages; what is not given does not matter."""

    topics: tuple[str, ...] = ()
    from_ms: int | None = None
    until_ms: int | None = None
    """Before this moment."""
    by: str = "store"
    """Which time counts: one of `TIMES`."""
    keys: tuple[str, ...] = ()
    """Messages with one of these among their keys."""
    tags: tuple[str, ...] = ()
    where: str | None = None
    """An SQL condition on the columns."""

    def __post_init__(self) -> None:
        if self.by not in TIMES:
            raise BadSetting(f"the time is {self.by!r}", hint=f"one of {', '.join(TIMES)}")
        if self.from_ms is not None and self.until_ms is not None and self.from_ms >= self.until_ms:
            raise BadSetting(
                f"the range is empty: it begins {moment(self.from_ms)} and ends "
                f"{moment(self.until_ms)}",
                hint="the end is after the beginning, and does not belong to the range",
            )

    @property
    def time(self) -> str:
        """The column with the time that counts."""
        return TIMES[self.by]

    def of(self, rows: "DataFrame") -> "DataFrame":
        """The rows that are chosen; raises BadSetting for columns that are missing."""
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
                    f"the condition {self.where!r}: {reason}",
                    hint=f"an SQL condition on {', '.join(rows.columns)}",
                ) from error
        return rows


def _check_columns(rows: "DataFrame", needed: Sequence[str]) -> None:
    for name in needed:
        if name not in rows.columns:
            raise BadSetting(
                f"the rows have no column {name!r}, they have {', '.join(rows.columns)}",
                hint="a lake must have been written with it; bodies that --schema took apart can "
                "be put together by to_json in Python and replayed from there",
            )


def outgoing(
    rows: "DataFrame", *, run: str, target: str | None, by: str = "store", limit: int | None = None
) -> "DataFrame":
    """What is sent for these rows, marked, in columns of the sink and with `ORDER`; `target` None
    sends each row to its own topic. Delays that were over are not repeated."""
    from pyspark.sql import functions as f

    columns = set(rows.columns)
    made = _placed(rows, by).select(
        f.lit(target).alias("topic") if target is not None else f.col("topic"),
        f.col("topic").alias(ORIGIN),
        *(name for name in SENT if name in columns - {"topic", "properties"}),
        _properties(columns, run).alias("properties"),
        *ORDER,
    )
    return made.orderBy(*ORDER) if limit is None else _first(made, limit)


def first_rows(rows: "DataFrame", limit: int, *, by: str = "store") -> "DataFrame":
    """Those that `outgoing` sends with the same limit, as they are."""
    return _first(_placed(rows, by), limit).select(*rows.columns)


def _first(placed: "DataFrame", limit: int) -> "DataFrame":
    """Spark holds as many as a limit in memory. Numbering them takes disk instead, and one task."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    if limit <= LIMIT_IN_MEMORY:
        return placed.orderBy(*ORDER).limit(limit)
    number = f.row_number().over(Window.orderBy(*ORDER))
    numbered = placed.withColumn("replay_number", number).where(f.col("replay_number") <= limit)
    return numbered.drop("replay_number").orderBy(*ORDER)


def _placed(rows: "DataFrame", by: str) -> "DataFrame":
    """The rows with the columns of `ORDER`."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    is_placed = set(rows.columns).issuperset(_QUEUE)
    place = f.col("queue_offset") if is_placed else f.lit(0).cast("bigint")
    key = f.concat_ws("|", "topic", "broker", "queue_id") if is_placed else f.lit(None)
    made = rows.withColumns({"queue_key": key.cast("string"), PLACE: place, TIME: f.col(TIMES[by])})
    if not is_placed:
        return made
    so_far = Window.partitionBy("queue_key").orderBy(PLACE)
    return made.withColumn(TIME, f.max(TIME).over(so_far))


def check_times(missing: int) -> None:
    """Raise BadSetting for rows whose place in time nobody knows."""
    if missing:
        raise BadSetting(
            f"{missing:,} of the rows have no time to be sent by",
            hint="leave them out by a condition: store_timestamp IS NOT NULL",
        )


def _properties(columns: set[str], run: str) -> "Column":
    """Those of the original, without marks of a replay before, and with this one's."""
    from pyspark.sql import functions as f

    marks = {PROPERTY_RUN: f.lit(run), PROPERTY_TOPIC: f.col("topic")}
    if "message_id" in columns:
        marks[PROPERTY_MESSAGE_ID] = f.col("message_id")
    if columns.issuperset(_QUEUE):
        broker = f.coalesce("broker", f.lit(""))
        marks[PROPERTY_OFFSET] = f.concat_ws(":", broker, "queue_id", "queue_offset")
    if "store_timestamp" in columns:
        marks[PROPERTY_STORED] = f.unix_millis("store_timestamp").cast("string")
    pairs = [part for name, value in marks.items() for part in (f.lit(name), value)]
    own = f.map_filter(f.create_map(*pairs), lambda _, value: value.isNotNull())
    if "properties" not in columns:
        return own
    kept = f.map_filter("properties", lambda name, _: ~name.startswith(MARK))
    empty = f.expr("cast(map() as map<string,string>)")
    return f.map_concat(f.coalesce(kept, empty), own)


@dataclass(frozen=True, slots=True)
class Group:
    """The messages of one topic, date and tag."""

    topic: str
    date: str
    tags: str | None
    rows: int

    def __str__(self) -> str:
        return f"{self.topic}  {self.date}  {self.tags or '(no tag)'}  {self.rows:,} rows"


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is to send."""

    rows: int
    bytes: int
    first_ms: int
    last_ms: int
    topics: tuple[str, ...]
    groups: tuple[Group, ...]
    """The largest ones, `GROUPS_MAX` at most."""
    groups_count: int
    samples: tuple[str, ...]
    """The first few, a line each."""

    @property
    def span(self) -> str:
        """For people."""
        return (
            f"{self.rows:,} messages, {self.bytes:,} bytes, from {moment(self.first_ms)} to "
            f"{moment(self.last_ms)} ({time_text(self.last_ms - self.first_ms)})"
        )

    def lines(self) -> list[str]:
        """All of it for people."""
        lines = [self.span, *(f"  {group}" for group in self.groups)]
        if self.groups_count > len(self.groups):
            lines.append(f"  and {self.groups_count - len(self.groups):,} smaller groups")
        return [*lines, "the first ones:", *(f"  {line}" for line in self.samples)]


def survey(rows: "DataFrame", by: str = "store") -> Survey | None:
    """Count rows with the source's columns, and show a few; None if there are none."""
    from pyspark.sql import functions as f

    time = TIMES[by]
    tags = f.col("tags") if "tags" in rows.columns else f.lit(None).cast("string")
    # Arithmetic instead of to_date(), which takes the session's time zone.
    date = f.expr(f"date_from_unix_date(cast(unix_micros({time}) div {_DAY_US} as int))")
    grouped = (
        rows.groupBy("topic", date.cast("string").alias("date"), tags.alias("tags"))
        .agg(
            f.count(f.lit(1)).alias("rows"),
            f.sum(f.octet_length("body")).alias("bytes"),
            f.unix_millis(f.min(time)).alias("first"),
            f.unix_millis(f.max(time)).alias("last"),
            f.count_if(f.col(time).isNull()).alias("timeless"),
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
            f.sum("timeless"),
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
        groups=tuple(Group(g["topic"], g["date"], g["tags"], g["rows"]) for g in groups),
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
    told = [f"{name}={row[name]}" for name in shown if row[name] is not None]
    return " ".join([moment(row["ms"]), *told, f"body={text!r}"])


def moment(ms: int) -> str:
    """A time for people, in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
