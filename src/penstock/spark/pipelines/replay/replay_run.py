"""A run of a replay: rows are chosen and ordered once, and sent slice by slice.

    <directory>/rows/<token>/*.parquet   what is sent, in order; a file has one slice or several
    <directory>/plan.json                the slices and what was asked for; made when all rows are
    <directory>/done/<number>            the last slice that was sent

The token is made by chance for each staging. Two starts at once do not disturb each other, since
one plan counts; and a directory that was deleted is another run, of the same name or not.

Rows are staged so that a second start sends the same ones: brokers delete, lakes grow, and a topic
may be its own target. The slices go in order, so one number tells what is done. It is written when
a slice has been sent: a start after a crash sends one slice again at most, which with
delivery=transactional is known by its number and published once. Staged rows are
deleted at the end.
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
from penstock.spark.pipelines.replay.pace import SLICES_MAX, Pace, Pacer, Slice, time_text
from penstock.spark.pipelines.replay.selection import (
    ORDER,
    ORIGIN,
    PLACE,
    TIME,
    check_times,
    moment,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

ROWS: Final = "rows"
PLAN: Final = "plan.json"
DONE: Final = "done"
FEW_ROWS: Final = 20_000
"""So many are sent by one task: more tasks would take longer to start."""
TELL_MS: Final = 2_000
"""Lines of progress come no more often."""


class Plan(msgspec.Struct, frozen=True):
    """What a run sends; it never changes."""

    token: str
    """The identity of what is staged."""
    begun_ms: int
    about: dict[str, str]
    """What the run was asked for: a second start must ask for the same."""
    routes: list[tuple[str, str]]
    """Topics that rows come from, and where those go."""
    slices: list[Slice]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.slices)


class Book:
    """The plan of a run, and how far it is."""

    def __init__(self, files: LakeFiles, run: str) -> None:
        self._files = files
        self._run = run

    def plan(self, about: Mapping[str, str]) -> Plan | None:
        """The plan; None if the run has not got that far. Raises BadSetting where it was begun
        for something else."""
        if self._files.size(PLAN) is None:
            return None
        try:
            plan = msgspec.json.decode(self._files.read(PLAN), type=Plan)
        except msgspec.DecodeError as error:
            raise PipelineFailed(
                f"the plan of the run {self._run} can't be read: {error}", hint="begin another run"
            ) from error
        for name in sorted(plan.about.keys() | about):
            had, has = plan.about.get(name), about.get(name)
            if had != has:
                raise BadSetting(
                    f"the run {self._run} was begun with {name} {had or 'not given'}, this is "
                    f"{has or 'without'}",
                    hint="give the same options to go on, or begin another run",
                )
        return plan

    def keep(self, plan: Plan) -> None:
        """From now on this is what the run sends."""
        if not self._files.write_new(PLAN, msgspec.json.encode(plan)):
            raise self._taken()

    def done(self) -> int:
        """How many slices were sent."""
        names = [file.path.rpartition("/")[2] for file in self._files.walk(DONE)]
        return max((int(name) + 1 for name in names if name.isdigit()), default=0)

    def mark(self, number: int) -> None:
        """This slice was sent, and so were all before it."""
        if not self._files.write_new(f"{DONE}/{number:08}", b""):
            raise self._taken()
        if number:
            self._files.remove(f"{DONE}/{number - 1:08}")

    def _taken(self) -> PipelineFailed:
        return PipelineFailed(
            f"the run {self._run} was started twice, and the other one is at work",
            hint="stop one of them; only with --delivery transactional nothing was sent twice",
        )


def slices_of(found: "list[Row]", *, origin_ms: int, window_ms: int | None) -> list[Slice]:
    """Slices from files and windows in order; a row has file, window, rows, bytes, first, last."""
    slices = []
    for number, row in enumerate(found):
        begin_ms = end_ms = None
        if window_ms is not None:
            begin_ms = origin_ms + row["window"] * window_ms
            end_ms = begin_ms + window_ms
        slices.append(
            Slice(
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


def _now_ms() -> float:
    return time.monotonic() * 1000


@dataclass
class Run:
    """Stages rows, and sends them."""

    spark: "SparkSession"
    directory: str
    name: str
    pace: Pace
    sink: Mapping[str, str]
    """Options of the sink; identity and topics are the run's."""
    deliver: bool = False
    """Send all at once, each to be delivered at its time."""
    about: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        if self.deliver and (
            self.pace.speed is None or self.sink.get("delivery") == "transactional"
        ):
            raise BadSetting(
                "messages can be sent ahead of their time where gaps are kept, and at least once",
                hint="give a pace or speed, and no delivery=transactional",
            )
        self.files = HadoopFiles(self.spark, self.directory)
        self.book = Book(self.files, self.name)

    def plan(self) -> Plan | None:
        """The plan of a run that was begun before."""
        return self.book.plan(self.about)

    def stage(
        self, rows: "DataFrame", check: Callable[[Plan], object], stop: threading.Event
    ) -> Plan | None:
        """Fix what is sent: rows as `replay_rows.outgoing` makes them. `check` may refuse it; None
        if there are no rows. Raises Stopped if `stop` is set meanwhile."""
        token = secrets.token_hex(8)
        staged = f"{ROWS}/{token}"
        try:
            with cancel_on_stop(self.spark, stop):
                writer = rows.write.option("maxRecordsPerFile", self.pace.rows_max)
                writer.parquet(self.files.url(staged))
                plan = self._planned(token)
            if plan is not None:
                check(plan)
                self.book.keep(plan)
                return plan
        except BaseException:
            self.files.remove(staged)
            raise
        self.files.remove(staged)
        return None

    def _planned(self, token: str) -> Plan | None:
        from pyspark.sql import functions as f

        staged = self.spark.read.parquet(self.files.url(f"{ROWS}/{token}"))
        origin_ms, timeless = staged.agg(
            f.unix_millis(f.min(TIME)), f.count_if(f.col(TIME).isNull())
        ).collect()[0]
        check_times(timeless)
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
                f"the replay would have more than {SLICES_MAX:,} slices", hint="take longer steps"
            )
        routes = staged.select(ORIGIN, "topic").distinct().orderBy(ORIGIN, "topic").collect()
        return Plan(
            token=token,
            begun_ms=round(time.time() * 1000),
            about=dict(self.about),
            routes=[(row[0], row[1]) for row in routes],
            slices=slices_of(found, origin_ms=origin_ms, window_ms=window_ms),
        )

    def send(self, plan: Plan, stop: threading.Event | None = None) -> bool:
        """Send what is left; False if `stop` was set before the end, which lets a slice finish."""
        stop = stop or threading.Event()
        done = self.book.done()
        left = plan.slices[done:]
        if left:
            if done:
                self.say(f"going on after {done:,} of {len(plan.slices):,} slices")
            self._send_slices(plan, left, stop)
        if self.book.done() < len(plan.slices):
            return False
        self.files.remove(ROWS)
        return True

    def _send_slices(self, plan: Plan, left: list[Slice], stop: threading.Event) -> None:
        schema = self.spark.read.parquet(self.files.url(f"{ROWS}/{plan.token}")).schema
        pace = replace(self.pace, speed=None) if self.deliver else self.pace
        pacer = Pacer(pace, left[0], _now_ms())
        told_ms, rows = -TELL_MS * 1.0, plan.rows - sum(each.rows for each in left)
        for each in left:
            wait_ms = pacer.wait_ms(each, _now_ms())
            if stop.wait(wait_ms / 1000) if wait_ms > 0 else stop.is_set():
                return
            begun_ms = _now_ms()
            pacer.began(each, begun_ms)
            self._write(self._rows(plan, each, schema), plan, each)
            self.book.mark(each.number)
            rows += each.rows
            if _now_ms() - told_ms >= TELL_MS or each is left[-1]:
                told_ms = _now_ms()
                self.say(self._line(plan, each, rows, told_ms - begun_ms, -wait_ms))

    def _rows(self, plan: Plan, each: Slice, schema: "StructType") -> "DataFrame":
        from pyspark.sql import functions as f

        file = self.files.url(f"{ROWS}/{plan.token}/{each.file}")
        rows = self.spark.read.schema(schema).parquet(file)
        if each.begin_ms is not None and each.end_ms is not None:
            begin, end = (f.timestamp_millis(f.lit(ms)) for ms in (each.begin_ms, each.end_ms))
            rows = rows.where((f.col(TIME) >= begin) & (f.col(TIME) < end))
        if self.deliver:
            origin_ms, speed = plan.slices[0].first_ms, self.pace.speed or 1.0
            after = ((f.unix_millis(TIME) - origin_ms) / speed).cast("bigint")
            at = f.timestamp_millis(after + plan.begun_ms)
            rows = rows.withColumn("deliver_timestamp", at)
        if each.rows <= FEW_ROWS:
            rows = rows.coalesce(1)
        else:  # a queue in one task
            rows = rows.repartition(self.spark.sparkContext.defaultParallelism, "queue_key")
        return rows.sortWithinPartitions(*ORDER).drop(TIME, PLACE, ORIGIN)

    def _write(self, rows: "DataFrame", plan: Plan, each: Slice) -> None:
        options: dict[str, Any] = {
            **self.sink,
            "sinkId": f"replay-{self.name}-{plan.token}",
            "batchId": str(each.number),
        }
        rows.write.format("penstock").options(**options).mode("append").save()

    def _line(self, plan: Plan, each: Slice, rows: int, took_ms: float, late_ms: float) -> str:
        late = f", {time_text(late_ms)} behind" if self._keeps_gaps and late_ms > 1000 else ""
        return (
            f"slice {each.number + 1:,} of {len(plan.slices):,}: {each.rows:,} rows, "
            f"{each.rows / max(took_ms, 1) * 1000:,.0f} rows/s, {rows:,} of {plan.rows:,} sent, "
            f"at {moment(each.last_ms)}{late}"
        )

    @property
    def _keeps_gaps(self) -> bool:
        return self.pace.speed is not None and not self.deliver
