"""`read` and `open_reader`: messages of topics or of log files, as Arrow data.

Options are those of the Spark source, with the same names, meaning and checks. Values may be
Python's: booleans, numbers, dates, dictionaries instead of JSON, lists instead of text with commas.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from penstock.arrow.connection_options import CONNECTION_OPTIONS, OptionReader
from penstock.arrow.log_reader import read_slice
from penstock.arrow.log_slices import LogSelection, plan_scan
from penstock.arrow.message_schema import arrow_schema
from penstock.arrow.schema_fitting import SchemaFitting
from penstock.arrow.source_options import SOURCE_OPTIONS, SourceOptions
from penstock.arrow.topic_batches import TopicBatches
from penstock.client.sync.sync_client import blocks_loop
from penstock.errors import BadSetting, BlockingInLoop

GROUP_PREFIX: Final = "penstock-arrow"

Texts: TypeAlias = str | Sequence[str]
"""One name, names separated by commas, or several."""
Timestamp: TypeAlias = str | int | datetime
QueueTable: TypeAlias = Mapping[str, Mapping[str, Mapping[int, int] | Mapping[str, int]]]
Duration: TypeAlias = str | int


class ReadOptions(TypedDict, total=False):
    nameserver: Texts
    namespace: str
    accessKey: str
    secretKey: str
    securityToken: str
    strictSigning: bool | str
    tls: bool | str
    tlsCa: str | os.PathLike[str]
    tlsCert: str | os.PathLike[str]
    tlsKey: str | os.PathLike[str]
    requestTimeout: Duration
    mode: str
    subscribe: Texts
    subscribePattern: str
    assign: str | Mapping[str, Mapping[str, Sequence[int]]]
    startingOffsets: str | QueueTable
    endingOffsets: str | QueueTable
    startingTimestamp: Timestamp
    endingTimestamp: Timestamp
    failOnDataLoss: bool | str
    groupIdPrefix: str
    tags: str
    columns: Texts
    readTimeout: Duration
    path: str | os.PathLike[str]
    checkCrc: bool | str
    brokerName: str


"""The options of a read (docs/arrow.md)."""


def read(topic: Texts | None = None, /, **options: Unpack[ReadOptions]) -> pa.Table:
    """The messages of a topic, or of several, that exist now; raises as `open_reader`.

    Everything is in memory: use `open_reader` for more than that.
    """
    return open_reader(topic, **options).read_all()


def open_reader(
    topic: Texts | None = None, /, **options: Unpack[ReadOptions]
) -> pa.RecordBatchReader:
    """The messages of a topic, or of several, that exist now, in batches.

    Which messages are read is fixed by this call. Raises BadSetting for options that can't be
    meant, NoRoute for an unknown topic, NoNameServer, DataLost. Batches raise DataLost and
    ReadGaveUp.
    """
    if blocks_loop():
        raise BlockingInLoop(
            "penstock.arrow blocks, and an event loop runs in this thread",
            hint="read in another thread: `await asyncio.to_thread(penstock.arrow.read, …)`",
        )
    chosen = _source_options(topic, options)
    schema = arrow_schema(chosen.columns)
    fitting = SchemaFitting(chosen, schema)
    batches = TopicBatches(chosen) if chosen.log_path is None else _log_batches(chosen)
    return pa.RecordBatchReader.from_batches(schema, fitting.fit(batches))


def _log_batches(options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The messages of log files; the files are chosen at once, and read later."""
    assert options.log_path is not None
    scan = LogSelection.of(options)
    slices = plan_scan(options.log_path, scan)
    return (batch for part in slices for batch in read_slice(part, scan))


# --- options -------------------------------------------------------------------------------------


def _source_options(topic: Texts | None, options: ReadOptions) -> SourceOptions:
    texts = {
        name: _text(name, value)
        for name, value in options.items()
        if value is not None  # as if it were left out
    }
    given = OptionReader(texts, (*CONNECTION_OPTIONS, *SOURCE_OPTIONS), what="reader")
    given.refuse(("minPartitions",), "is for Spark only: here one thread reads")
    if topic is not None:
        given.refuse(("subscribe",), "names topics, but the first argument names them already")
        texts["subscribe"] = _text("subscribe", topic)
    return SourceOptions.of(texts, group_prefix=GROUP_PREFIX)


def _text(name: str, value: object) -> str:
    """The value of an option as Spark would pass it; raises BadSetting."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return (";" if name == "nameserver" else ",").join(value)
    raise BadSetting(
        f"the option {name} is of type {type(value).__name__}",
        hint="set text, a number, true or false, a datetime, a list of names, or a dictionary",
    )
