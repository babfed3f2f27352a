"""Describes and runs pipelines: options, triggers, progress, signals.

A `Pipeline` has a name, options, outputs, and a function that starts it on a SparkSession. The
function receives a `PipelineJob` and returns the streaming queries that it has started; none if all
work is done when it returns. Spark is not imported before a pipeline runs, so that listing and
describing pipelines are fast.
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

from penstock.arrow.connection_options import CONNECTION_OPTIONS, ConnectionOptions, OptionReader
from penstock.errors import BadSetting
from penstock.spark.pipelines.batch_progress import BatchProgress, new_batches
from penstock.spark.pipelines.query_errors import translate_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from penstock import Admin
    from penstock.wire.bodies.client_bodies import MessageQueue

PIPELINES: Final = {
    # name: module and attribute of the Pipeline
    "lake": "penstock.spark.pipelines.lake.lake_pipeline:PIPELINE",
    "registration": "penstock.spark.pipelines.registration.registration_pipeline:PIPELINE",
    "insight": "penstock.spark.pipelines.insight.insight_pipeline:PIPELINE",
    "replay": "penstock.spark.pipelines.replay.replay_pipeline:PIPELINE",
}
POLL_SECONDS: Final = 0.5
"""How often the progress of running queries is read; few batches are shorter."""

SERVER_TIMEOUT_MS: Final = 10_000
"""How long a starting pipeline waits for servers that do not answer."""

Value = str | int | float | bool | None
_KIND_NAMES: Final[Mapping[type, str]] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


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
        """The value, or the default if it is None; raises BadSetting."""
        if value is None:
            if self.required:
                raise BadSetting(f"{self.flag} is missing", hint=self.help)
            return self.default
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            kind = _KIND_NAMES[self.kind]
            raise BadSetting(f"{self.flag}: {value!r} is not {kind}", hint=self.help)
        if self.choices and value not in self.choices:
            raise BadSetting(
                f"{self.flag}: {value!r} is not one of {', '.join(self.choices)}", hint=self.help
            )
        return value


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """A path or a topic that a pipeline writes; names of options are in braces."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Trigger:
    """When batches start."""

    text: str
    kind: str  # processingTime, availableNow or once
    value: str | bool

    @classmethod
    def parse(cls, text: str) -> "Trigger":
        """From `once`, `available-now` or an interval such as `10 seconds`; raises BadSetting."""
        if text == "once":
            return cls(text, "once", True)
        if text == "available-now":
            return cls(text, "availableNow", True)
        found = re.fullmatch(
            r"(\d+) ?(ms|s|m|h|(?:millisecond|second|minute|hour)s?)", text.strip()
        )
        if found is None:
            raise BadSetting(
                f"{text!r} is not a trigger",
                hint='use once, available-now, or an interval such as "10 seconds"',
            )
        units = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
        count, unit = found.groups()
        return cls(text, "processingTime", f"{count} {units.get(unit, unit)}")

    def apply(self, writer: "DataStreamWriter") -> "DataStreamWriter":
        """The writer with this trigger."""
        return writer.trigger(**{self.kind: self.value})  # type: ignore[arg-type]


def _ignore_line(line: str) -> None:
    """The default for `say`."""


def _no_verification(job: "PipelineJob") -> None:
    """The default for `verify`."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """The options and surroundings of one run of a pipeline."""

    options: Mapping[str, Value]
    connection: Mapping[str, str] = field(default_factory=dict)
    """The connection options of format `penstock`: nameserver, accessKey and so on."""
    checkpoint: str | None = None
    trigger: Trigger = field(default_factory=lambda: Trigger.parse("10 seconds"))
    local_files: bool = False
    """Whether paths without a scheme are certainly on this machine."""
    say: Callable[[str], None] = _ignore_line
    """Shows a line to the user."""
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """Rows by query name and batch number, for batches whose rows Spark does not see."""

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def option_reader(self, *names: str) -> OptionReader:
        """A reader for these options that parses them like options of format `penstock`."""
        return OptionReader(
            {name: self[name] for name in names if self[name] is not None}, names, what="pipeline"
        )

    def stream(
        self, spark: "SparkSession", format_name: str = "penstock", **options: str
    ) -> "DataFrame":
        """A stream of messages, with options of the format.

        Call `queues` first: errors that the source raises later are the text of a traceback.
        """
        reader = spark.readStream.format(format_name).options(**self.connection, **options)
        return reader.load()

    def queues(self, **options: str) -> "set[MessageQueue]":
        """The queues that the stream will read first; raises BadSetting, NoRoute, ReadGaveUp."""
        from penstock.arrow.cluster_metadata import ClusterMetadata
        from penstock.arrow.source_options import SourceOptions

        chosen = SourceOptions.of({**self.connection, **options}, stream=True)
        with ClusterMetadata(chosen.connection, timeout_ms=SERVER_TIMEOUT_MS) as cluster:
            return cluster.required_queues(chosen.topics)


def connect_admin(connection: Mapping[str, str]) -> "Admin":
    """An admin client for the servers of a job; raises BadSetting."""
    from penstock import Admin

    reader = OptionReader(dict(connection), CONNECTION_OPTIONS, what="pipeline")
    options = ConnectionOptions.of(reader)
    return Admin(options.nameservers, **options.client_keywords())


Start = Callable[["SparkSession", PipelineJob], "Sequence[StreamingQuery]"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline that `penstock pipeline` lists, describes and runs."""

    name: str
    summary: str
    options: tuple[Option, ...]
    outputs: tuple[PipelineOutput, ...]
    start: Start
    trigger: str = "10 seconds"
    """The default trigger."""
    verify: Callable[[PipelineJob], object] = _no_verification
    """Raises errors that can be detected before Spark is started, which takes several seconds."""

    def check(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """All options with values or defaults; raises BadSetting if one is invalid."""
        known = {option.name for option in self.options}
        for name in values:
            if name not in known:
                raise BadSetting(
                    f"pipeline {self.name} has no option {name!r}",
                    hint=f"its options are {', '.join(sorted(known))}",
                )
        return {option.name: option.check(values.get(option.name)) for option in self.options}

    def job(
        self,
        options: Mapping[str, Value],
        *,
        connection: Mapping[str, str] = MappingProxyType({}),
        checkpoint: str | None = None,
        trigger: str | None = None,
        local_files: bool = False,
        say: Callable[[str], None] = _ignore_line,
    ) -> PipelineJob:
        """A job with checked options; raises a PenstockError."""
        job = PipelineJob(
            options=self.check(options),
            connection=connection,
            checkpoint=checkpoint,
            trigger=Trigger.parse(trigger or self.trigger),
            local_files=local_files,
            say=say,
        )
        self.verify(job)
        return job


def find_pipeline(name: str) -> Pipeline:
    """The pipeline of this name; raises BadSetting."""
    if name not in PIPELINES:
        raise BadSetting(
            f"there is no pipeline {name!r}", hint=f"the pipelines are {', '.join(PIPELINES)}"
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
    say: Callable[[str], None] = _ignore_line,
    on_batch: Callable[[BatchProgress], None] | None = None,
) -> bool:
    """Run a pipeline until it ends or until SIGINT or SIGTERM; False if a signal stopped it.

    `say` receives lines for the user, `on_batch` each completed batch. Without `on_batch`, batches
    are lines too. Errors of Spark and of the pipeline are raised as PenstockErrors.
    """
    job = pipeline.job(
        options, connection=connection, checkpoint=checkpoint, trigger=trigger, say=say
    )
    with stop_signals() as stop, translate_errors():
        queries = pipeline.start(spark, job)
        return follow(queries, on_batch or (lambda batch: say(str(batch))), stop, job.rows)


def follow(
    queries: "Sequence[StreamingQuery]",
    on_batch: Callable[[BatchProgress], None],
    stop: threading.Event,
    rows: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> bool:
    """Report each batch until all queries have ended; if one fails, the others are stopped.

    When `stop` is set, the queries are stopped and False is returned. Their current batches are
    abandoned and run again at the next start.
    """
    last_batches: dict[str, int] = {}
    try:
        while not stop.is_set():
            active = [query for query in queries if query.isActive]
            for query in queries:
                for batch in new_batches(query, last_batches, named=len(queries) > 1, rows=rows):
                    on_batch(batch)
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
    """An event that SIGINT and SIGTERM set; a second SIGINT raises KeyboardInterrupt.

    Spark's own handler would cancel the jobs of a query, so that it fails instead of ending. In
    other threads than the main thread signals can't be handled, and the event is never set.
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
