"""A run of a replay: selects and orders the rows once, and sends them slice by slice.

    <directory>/rows/<token>/*.parquet   the rows to send, in order; a file has one or more slices
    <directory>/plan.json                the options and the slices; written after the rows
    <directory>/done/<number>            the last slice that was sent

The rows are staged so that a run that is continued sends the same messages, although brokers delete
messages, lakes grow, and a topic may be its own target. The token is random for each staging: if
two runs start at once, only one plan is valid, and if the directory is deleted, the next run is a
different one even if its name is the same.

Slices are sent in order, so one number records the progress. It is written after a slice was sent.
After a crash at most one slice is sent again. With delivery=transactional the sink recognizes it by
its number. The staged rows are deleted at the end.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.job_cancel import cancel_on_stop
from penstock.spark.pipelines.lake.lake_files import HadoopFiles, LakeFiles
from penstock.spark.pipelines.replay.pace import SLICES_MAX, Pace, Pacer, ReplaySlice, duration_text
from penstock.spark.pipelines.replay.selection import (
    ORDER,
    ORIGIN,
    POSITION,
    TIME,
    check_times,
    time_text,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

ROWS: Final = "rows"
PLAN: Final = "plan.json"
DONE: Final = "done"
SINGLE_TASK_ROWS_MAX: Final = 20_000
"""Up to this number rows are sent by one task; more tasks would take longer to start."""
PROGRESS_INTERVAL_MS: Final = 2_000
"""The minimum time between two lines of progress."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """What a run sends; the content of `plan.json`, which never changes."""

    token: str
    """Identifies the staged rows."""
    started_ms: int = msgspec.field(name="begun_ms")
    options: dict[str, str] = msgspec.field(name="about")
    """The options that must be the same when the run is continued."""
    routes: list[tuple[str, str]]
    """The topics of the rows and their target topics."""
    slices: list[ReplaySlice]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.slices)


class RunState:
    """The plan and the progress of a run, stored in its directory."""

    def __init__(self, files: LakeFiles, run: str) -> None:
        self._files = files
        self._run = run

    def plan(self, options: Mapping[str, str]) -> ReplayPlan | None:
        """The plan; None if it does not exist yet.

        Raises BadSetting if the run was started with other options.
        """
        if self._files.size(PLAN) is None:
            return None
        try:
            plan = msgspec.json.decode(self._files.read(PLAN), type=ReplayPlan)
        except msgspec.DecodeError as error:
            raise PipelineFailed(
                f"the plan of run {self._run} can't be read: {error}", hint="start a new run"
            ) from error
        for name in sorted(plan.options.keys() | options):
            before, now = plan.options.get(name), options.get(name)
            if before != now:
                raise BadSetting(
                    f"run {self._run} was started {_with_option(name, before)}, but is continued "
                    f"{_with_option(name, now)}",
                    hint="use the same options to continue, or start a new run",
                )
        return plan

    def save_plan(self, plan: ReplayPlan) -> None:
        """Write the plan; raises PipelineFailed if another process has written one."""
        if not self._files.write_new(PLAN, msgspec.json.encode(plan)):
            raise self._started_twice()

    def slices_sent(self) -> int:
        """The number of slices that were sent."""
        names = [file.path.rpartition("/")[2] for file in self._files.walk(DONE)]
        return max((int(name) + 1 for name in names if name.isdigit()), default=0)

    def mark_sent(self, number: int) -> None:
        """Record that this slice and all before it were sent."""
        if not self._files.write_new(f"{DONE}/{number:08}", b""):
            raise self._started_twice()
        if number:
            self._files.remove(f"{DONE}/{number - 1:08}")

    def _started_twice(self) -> PipelineFailed:
        return PipelineFailed(
            f"run {self._run} was started twice, and the other process is sending it",
            hint="stop one of them; without --delivery transactional messages may be duplicated",
        )


def slices_of(found: "list[Row]", *, origin_ms: int, window_ms: int | None) -> list[ReplaySlice]:
    """Slices from ordered rows with the columns file, window, rows, bytes, first and last."""
    slices = []
    for number, row in enumerate(found):
        begin_ms = end_ms = None
        if window_ms is not None:
            begin_ms = origin_ms + row["window"] * window_ms
            end_ms = begin_ms + window_ms
        slices.append(
            ReplaySlice(
                number,
                row["file"],
                row["rows"],
                row["bytes"] or 0,
                row["first"],
                row["last"],
                begin_ms,
                end_ms,
            )
        )
    return slices


def _with_option(name: str, value: str | None) -> str:
    return f"with {name} {value}" if value else f"without {name}"


def _now_ms() -> float:
    return time.monotonic() * 1000


@dataclass
class ReplayRun:
    """Stages the rows of a run and sends them."""

    spark: "SparkSession"
    directory: str
    name: str
    pace: Pace
    sink: Mapping[str, str]
    """Options of the sink, without sink id, batch id and topic."""
    deliver: bool = False
    """Send all messages at once as timer messages."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options that must be the same when the run is continued."""
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.deliver and (
            self.pace.speed is None or self.sink.get("delivery") == "transactional"
        ):
            raise BadSetting(
                "deliver needs a speed and at-least-once delivery",
                hint="set a speed, and do not use delivery=transactional",
            )
        self.files = HadoopFiles(self.spark, self.directory)
        self.state = RunState(self.files, self.name)

    def plan(self) -> ReplayPlan | None:
        """The plan of an earlier start of this run."""
        return self.state.plan(self.options)

    def stage(
        self, rows: "DataFrame", check: Callable[[ReplayPlan], object], stop: threading.Event
    ) -> ReplayPlan | None:
        """Write the rows of `selection.outgoing_rows` and the plan; None if there are no rows.

        `check` may raise an error. Raises Stopped if `stop` is set in the meantime.
        """
        token = secrets.token_hex(8)
        staged = f"{ROWS}/{token}"
        try:
            with cancel_on_stop(self.spark, stop):
                writer = rows.write.option("maxRecordsPerFile", self.pace.rows_max)
                writer.parquet(self.files.url(staged))
                plan = self._make_plan(token)
            if plan is not None:
                check(plan)
                self.state.save_plan(plan)
                return plan
        except BaseException:
            self.files.remove(staged)
            raise
        self.files.remove(staged)
        return None

    def _make_plan(self, token: str) -> ReplayPlan | None:
        from pyspark.sql import functions as f

        staged = self.spark.read.parquet(self.files.url(f"{ROWS}/{token}"))
        origin_ms, without_time = staged.agg(
            f.unix_millis(f.min(TIME)), f.count_if(f.col(TIME).isNull())
        ).collect()[0]
        check_times(without_time)
        if origin_ms is None:
            return None
        window_ms, ms = self.pace.window_ms, f.unix_millis(TIME)
        window = f.lit(0) if window_ms is None else f.floor((ms - origin_ms) / window_ms)
        found = (
            staged.groupBy(f.col("_metadata.file_name").alias("file"), window.alias("window"))
            .agg(
                f.count(f.lit(1)).alias("rows"),
                f.sum(f.octet_length("body")).alias("bytes"),
                f.min(ms).alias("first"),
                f.max(ms).alias("last"),
                f.min(f.struct(*ORDER)).alias("order"),
            )
            .orderBy("order")
            .drop("order")
            .limit(SLICES_MAX + 1)
            .collect()
        )
        if len(found) > SLICES_MAX:
            raise BadSetting(
                f"the replay would have more than {SLICES_MAX:,} slices", hint="use a longer --step"
            )
        routes = staged.select(ORIGIN, "topic").distinct().orderBy(ORIGIN, "topic").collect()
        return ReplayPlan(
            token=token,
            started_ms=round(time.time() * 1000),
            options=dict(self.options),
            routes=[(row[0], row[1]) for row in routes],
            slices=slices_of(found, origin_ms=origin_ms, window_ms=window_ms),
        )

    def send(self, plan: ReplayPlan, stop: threading.Event | None = None) -> bool:
        """Send the remaining slices; False if `stop` was set, after the current slice."""
        stop = stop or threading.Event()
        sent = self.state.slices_sent()
        remaining = plan.slices[sent:]
        if remaining:
            if sent:
                self.say(f"continuing after {sent:,} of {len(plan.slices):,} slices")
            self._send_slices(plan, remaining, stop)
        if self.state.slices_sent() < len(plan.slices):
            return False
        self.files.remove(ROWS)
        return True

    def _send_slices(
        self, plan: ReplayPlan, remaining: list[ReplaySlice], stop: threading.Event
    ) -> None:
        schema = self.spark.read.parquet(self.files.url(f"{ROWS}/{plan.token}")).schema
        pace = replace(self.pace, speed=None) if self.deliver else self.pace
        pacer = Pacer(pace, remaining[0], _now_ms())
        reported_ms = -float(PROGRESS_INTERVAL_MS)
        rows = plan.rows - sum(each.rows for each in remaining)
        for each in remaining:
            wait_ms = pacer.wait_ms(each, _now_ms())
            if stop.wait(wait_ms / 1000) if wait_ms > 0 else stop.is_set():
                return
            started_ms = _now_ms()
            pacer.slice_started(each, started_ms)
            self._write(self._rows(plan, each, schema), plan, each)
            self.state.mark_sent(each.number)
            rows += each.rows
            now_ms = _now_ms()
            if now_ms - reported_ms >= PROGRESS_INTERVAL_MS or each is remaining[-1]:
                reported_ms = now_ms
                self.say(self._progress_line(plan, each, rows, now_ms - started_ms, -wait_ms))

    def _rows(self, plan: ReplayPlan, each: ReplaySlice, schema: "StructType") -> "DataFrame":
        from pyspark.sql import functions as f

        file = self.files.url(f"{ROWS}/{plan.token}/{each.file}")
        rows = self.spark.read.schema(schema).parquet(file)
        if each.begin_ms is not None and each.end_ms is not None:
            begin, end = (f.timestamp_millis(f.lit(ms)) for ms in (each.begin_ms, each.end_ms))
            rows = rows.where((f.col(TIME) >= begin) & (f.col(TIME) < end))
        if self.deliver:
            origin_ms, speed = plan.slices[0].first_ms, self.pace.speed or 1.0
            after = ((f.unix_millis(TIME) - origin_ms) / speed).cast("bigint")
            at = f.timestamp_millis(after + plan.started_ms)
            rows = rows.withColumn("deliver_timestamp", at)
        if each.rows <= SINGLE_TASK_ROWS_MAX:
            rows = rows.coalesce(1)
        else:  # all messages of a queue in one task
            rows = rows.repartition(self.spark.sparkContext.defaultParallelism, "queue_key")
        return rows.sortWithinPartitions(*ORDER).drop(TIME, POSITION, ORIGIN)

    def _write(self, rows: "DataFrame", plan: ReplayPlan, each: ReplaySlice) -> None:
        options: dict[str, Any] = {
            **self.sink,
            "sinkId": f"replay-{self.name}-{plan.token}",
            "batchId": str(each.number),
        }
        rows.write.format("penstock").options(**options).mode("append").save()

    def _progress_line(
        self, plan: ReplayPlan, each: ReplaySlice, rows: int, took_ms: float, late_ms: float
    ) -> str:
        keeps_pace = self.pace.speed is not None and not self.deliver
        late = f", {duration_text(late_ms)} late" if keeps_pace and late_ms > 1000 else ""
        return (
            f"slice {each.number + 1:,} of {len(plan.slices):,}: {each.rows:,} rows, "
            f"{each.rows / max(took_ms, 1) * 1000:,.0f} rows/s, {rows:,} of {plan.rows:,} sent, "
            f"at {time_text(each.last_ms)}{late}"
        )
