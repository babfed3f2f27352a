"""Format `penstock`: topics, or the log files of a store, as DataFrames and streams.

    spark.read.format("penstock").option("subscribe", "orders").load()
    spark.readStream.format("penstock").option("subscribe", "orders").load()

Spark creates these objects in its own processes: one plans, others read, and they are pickled in
between. So they hold options and ranges, and connect when they are used.
"""

from typing import Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.arrow.message_schema import FIELDS
from penstock.arrow.source_options import SourceOptions
from penstock.errors import BadSetting
from penstock.spark.source.batch_readers import LogReader, TopicReader
from penstock.spark.spark_schema import spark_schema
from penstock.spark.worker_entry import in_worker

NAME: Final = "penstock"


class DefaultSource(DataSource):
    """The data source `penstock`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    @in_worker()
    def schema(self) -> StructType:
        """The default columns, or those of the option `columns`."""
        columns = SourceOptions.columns_of(self.options)
        return spark_schema(columns)

    @in_worker()
    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.of(self.options).with_columns(_columns(schema))
        return (TopicReader if options.log_path is None else LogReader)(options, schema)

    @in_worker()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from penstock.spark.source.stream_reader import TopicStreamReader

        options = SourceOptions.of(self.options, stream=True).with_columns(_columns(schema))
        return TopicStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink.data_writer import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from penstock.spark.sink.data_writer import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)


def _columns(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema, which may be the user's; raises BadSetting."""
    names = tuple(schema.fieldNames())
    for name in names:
        if name not in FIELDS:
            raise BadSetting(
                f"the schema has a column {name!r}, but a message has no such column",
                hint=f"the columns are {', '.join(FIELDS)}",
            )
    expected = spark_schema(names)
    for field, ours in zip(schema.fields, expected.fields, strict=True):
        if field.dataType.simpleString() != ours.dataType.simpleString():
            raise BadSetting(
                f"the schema has {field.name} as {field.dataType.simpleString()}, but its type is "
                f"{ours.dataType.simpleString()}",
                hint="leave the schema out, and cast columns afterwards",
            )
    return names
