"""Batches of stored columns, fitted to the schema that the reader wants."""

import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.message_schema import DATE, arrow_schema, stored_columns
from penstock.arrow.source_options import SourceOptions

GROUP_TOPICS: Final = "%RETRY%|%DLQ%"
"""The prefixes of retry and dead-letter topics, which come before the namespace."""


class SchemaFitting:
    """Converts batches to a schema, nullability included, and topics to names without the
    namespace."""

    def __init__(self, options: SourceOptions, wanted: pa.Schema) -> None:
        stored = arrow_schema(stored_columns(options.columns))
        self._schema = None if wanted.equals(stored) else wanted
        self._namespace = options.connection.namespace if "topic" in options.columns else ""

    def fit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows in the wanted schema."""
        return map(self.fitted, batches)

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of one batch in the wanted schema."""
        if self._schema is None and not self._namespace:
            return batch
        wanted = self._schema or batch.schema
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if DATE in wanted.names:
            columns[DATE] = columns["store_timestamp"].cast(pa.date32())
        if self._namespace:
            columns["topic"] = pc.replace_substring_regex(
                columns["topic"],
                pattern=f"^({GROUP_TOPICS})?{re.escape(self._namespace)}%",
                replacement=r"\1",
            )
        arrays = [columns[field.name].cast(field.type) for field in wanted]
        return pa.RecordBatch.from_arrays(arrays, schema=wanted)
