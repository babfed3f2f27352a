"""Records a run of `penstock pipeline run` for the console."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.console.pipeline_runs import (
    PipelineRun,
    RunBatch,
    RunRecorder,
    default_directory,
    new_id,
)
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.spark.pipelines.batch_progress import BatchProgress


@dataclass(slots=True)
class RecordedRun:
    """A run: its batches are shown and recorded. `ended` is false if it was stopped."""

    on_batch: "Callable[[BatchProgress], None]"
    ended: bool = False


@contextmanager
def recorded(
    pipeline: str,
    options: Mapping[str, object],
    nameserver: str,
    show: "Callable[[BatchProgress], None]",
) -> Iterator[RecordedRun]:
    """Record the run of a pipeline. A directory that can't be written does not matter."""
    now_ms = _now_ms()
    recorder = RunRecorder(
        default_directory(),
        PipelineRun(
            id=new_id(),
            pipeline=pipeline,
            options={name: str(value) for name, value in options.items() if value is not None},
            nameserver=nameserver,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_ms=now_ms,
            updated_ms=now_ms,
        ),
    )

    def on_batch(batch: "BatchProgress") -> None:
        show(batch)
        recorder.batch(
            RunBatch(_now_ms(), batch.query, batch.number, batch.rows, batch.seconds, batch.lag)
        )

    run = RecordedRun(on_batch)
    try:
        yield run
    except BaseException as error:
        text = error.remark() if isinstance(error, PenstockError) else type(error).__name__
        recorder.end("failed", _now_ms(), text)
        raise
    recorder.end("finished" if run.ended else "stopped", _now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
