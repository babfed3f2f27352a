"""What every pipeline shares: its description, the job it is given, triggers, progress and its end.

A pipeline is a `Pipeline`: a name, options, the tables it writes, and a function that starts it on
a SparkSession and returns its streaming queries (none, if all was done when it returns). The
function gets a `Job`: the options as values and how servers, checkpoint and trigger were chosen.
Nothing here imports Spark before a pipeline runs, so listing and describing are quick.
"""

import importlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadSetting
from penstock.spark.connection_options import OptionReader
from penstock.spark.pipelines.batch_progress import Batch, new_batches
from penstock.spark.pipelines.query_errors import for_people

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from penstock.wire.bodies.client_bodies import MessageQueue

PIPELINES: Final = {
    # name → module:attribute of its Pipeline
    "lake": "penstock.spark.pipelines.lake.lake_pipeline:PIPELINE",
    "registration": "penstock.spark.pipelines.registration.registration_pipeline:PIPELINE",
    "insight": "penstock.spark.pipelines.insight.insight_pipeline:PIPELINE",
    "replay": "penstock.spark.pipelines.replay.replay_pipeline:PIPELINE",
}
POLL_SECONDS: Final = 0.5
"""How often a running query is asked for its progress; batches take about as long at least."""

SERVERS_MS: Final = 10_000
"""How long a pipeline that starts waits for servers that do not answer."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a pipeline: `--some-name` on the command line, `some_name` in Python."""

    name: str
    help: str
    kind: type[str] | type[int] | type[float] | type[bool] = str
    default: Value = None
    required: bool = False
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: Value) -> Value:
        """The value as it is used; raises BadSetting."""
        if value is None:
            if self.required:
                raise BadSetting(f"{self.flag} is missing", hint=self.help)
            return self.default
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise BadSetting(f"{self.flag}: {value!r} is no {self.kind.__name__}", hint=self.help)
        if self.choices and value not in self.choices:
            raise BadSetting(
                f"{self.flag}: {value!r} is not known", hint=f"one of {', '.join(self.choices)}"
            )
        return value


@dataclass(frozen=True, slots=True)
class Table:
    """Something that a pipeline writes: a path or a topic, with options' names in braces."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Trigger:
    """When batches begin."""

    text: str
    kind: str  # processingTime, availableNow or once
    value: str | bool

    @classmethod
    def parse(cls, text: str) -> "Trigger":
        """`once`, `available-now`, or an interval as `10 seconds`; raises BadSetting."""
        if text == "once":
            return cls(text, "once", True)
        if text == "available-now":
            return cls(text, "availableNow", True)
        found = re.fullmatch(
            r"(\d+) ?(ms|s|m|h|(?:millisecond|second|minute|hour)s?)", text.strip()
        )
        if found is None:
            raise BadSetting(
                f"{text!r} is no trigger", hint='once, available-now, or an interval: "10 seconds"'
            )
        units = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
        count, unit = found.groups()
        return cls(text, "processingTime", f"{count} {units.get(unit, unit)}")

    @property
    def ends(self) -> bool:
        """Whether the query ends by itself."""
        return self.kind != "processingTime"

    def on(self, writer: "DataStreamWriter") -> "DataStreamWriter":
        return writer.trigger(**{self.kind: self.value})  # type: ignore[arg-type]


def _quiet(line: str) -> None:
    """For jobs that nobody watches."""


def _nothing(job: "Job") -> None:
    """For pipelines that tell all when they start."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a pipeline's function is given beside the session."""

    options: Mapping[str, Value]
    connection: Mapping[str, str] = field(default_factory=dict)
    """Options of format `penstock` that say how servers are reached: nameserver, accessKey, …"""
    checkpoint: str | None = None
    trigger: Trigger = field(default_factory=lambda: Trigger.parse("10 seconds"))
    say: Callable[[str], None] = _quiet
    """Tells the person who runs it one line."""
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """Rows by name of a query and number of a batch, where Spark itself does not see them."""

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def given(self, *names: str) -> OptionReader:
        """Some options, to be read by kind as those of format `penstock` are."""
        return OptionReader(
            {name: self[name] for name in names if self[name] is not None}, names, what="pipeline"
        )

    def stream(
        self, spark: "SparkSession", format_name: str = "penstock", **options: str
    ) -> "DataFrame":
        """A stream of messages: `options` are those of format `penstock`, or another's.

        Whoever verifies a job asks for its `queues` before: what the source raises later comes out
        of Spark as the text of a traceback.
        """
        reader = spark.readStream.format(format_name).options(**self.connection, **options)
        return reader.load()

    def queues(self, **options: str) -> "set[MessageQueue]":
        """The queues that such a stream reads at first; raises BadSetting, NoRoute, ReadGaveUp."""
        from penstock.spark.cluster_metadata import ClusterMetadata
        from penstock.spark.source.source_options import SourceOptions

        chosen = SourceOptions.of({**self.connection, **options}, stream=True)
        with ClusterMetadata(chosen.connection, timeout_ms=SERVERS_MS) as cluster:
            return cluster.required_queues(chosen.topics)


Start = Callable[["SparkSession", Job], "Sequence[StreamingQuery]"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline as `penstock pipeline` lists, describes and runs it."""

    name: str
    summary: str
    options: tuple[Option, ...]
    tables: tuple[Table, ...]
    start: Start
    trigger: str = "10 seconds"
    """The trigger if none is chosen."""
    verify: Callable[[Job], object] = _nothing
    """Raises what is wrong as far as that can be told before Spark starts, which takes a while."""

    def check(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """All options with their values; raises BadSetting for those that can't be."""
        known = {option.name for option in self.options}
        for name in values:
            if name not in known:
                raise BadSetting(
                    f"pipeline {self.name} has no option {name!r}",
                    hint=f"it has {', '.join(sorted(known))}",
                )
        return {option.name: option.check(values.get(option.name)) for option in self.options}

    def job(
        self,
        options: Mapping[str, Value],
        *,
        connection: Mapping[str, str] = MappingProxyType({}),
        checkpoint: str | None = None,
        trigger: str | None = None,
        say: Callable[[str], None] = _quiet,
    ) -> Job:
        """What the pipeline is given, checked; raises a PenstockError."""
        job = Job(
            options=self.check(options),
            connection=connection,
            checkpoint=checkpoint,
            trigger=Trigger.parse(trigger or self.trigger),
            say=say,
        )
        self.verify(job)
        return job


def find_pipeline(name: str) -> Pipeline:
    """The pipeline of this name; raises BadSetting."""
    if name not in PIPELINES:
        raise BadSetting(
            f"no pipeline is called {name!r}", hint=f"there are {', '.join(PIPELINES)}"
        )
    module, _, attribute = PIPELINES[name].partition(":")
    pipeline = getattr(importlib.import_module(module), attribute)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def run_pipeline(
    pipeline: Pipeline,
    options: Mapping[str, Value],
    *,
    spark: "SparkSession",
    connection: Mapping[str, str] = MappingProxyType({}),
    checkpoint: str | None = None,
    trigger: str | None = None,
    say: Callable[[str], None] = _quiet,
    tell: Callable[[Batch], None] | None = None,
) -> bool:
    """Run a pipeline to its end, or until SIGINT or SIGTERM; False if it was a signal.

    `say` gets lines for people; `tell` gets each batch, which otherwise is one of the lines. Raises
    a PenstockError for whatever goes wrong in Spark or in a pipeline.
    """
    job = pipeline.job(
        options, connection=connection, checkpoint=checkpoint, trigger=trigger, say=say
    )
    with stop_signals() as stop, for_people():
        queries = pipeline.start(spark, job)
        return follow(queries, tell or (lambda batch: say(str(batch))), stop, job.rows)


def follow(
    queries: "Sequence[StreamingQuery]",
    tell: Callable[[Batch], None],
    stop: threading.Event,
    rows: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> bool:
    """Tell of each batch until all queries have ended; one that fails ends the others.

    When `stop` is set the queries are stopped: the batch that is under way is given up, and is run
    again at the next start. Returns whether they ended by themselves.
    """
    seen: dict[str, int] = {}
    try:
        while not stop.is_set():
            active = [query for query in queries if query.isActive]
            for query in queries:
                for batch in new_batches(query, seen, named=len(queries) > 1, rows=rows):
                    tell(batch)
            if not active or any(query.exception() for query in queries):
                break
            active[0].awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
        return not stop.is_set()
    finally:
        for query in queries:
            query.stop()
        for query in queries:
            if not stop.is_set() and (error := query.exception()) is not None:
                raise error


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second SIGINT interrupts as usual.

    Spark's own handler would cancel the jobs of a query, which then fails instead of ending.
    Outside of the main thread signals can't be caught, and whoever runs us there stops us.
    """
    stop = threading.Event()

    def catch(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    previous = {}
    with suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, catch)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
