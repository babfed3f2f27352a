"""The columns of a message: names, types, and the option `columns`."""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from penstock.errors import BadSetting

CONTROL_TOPIC: Final = "PENSTOCK_SINK_CONTROL"
"""The control records of transactional sinks; not an application's topic, despite its name."""

DATE: Final = "date"
"""The date of `store_timestamp` in UTC: the only column derived from another."""

COLUMNS_WITHOUT_STATISTICS: Final = {
    "body": ("body",),
    "properties": ("properties.key_value.key", "properties.key_value.value"),
}
"""Columns, with their Parquet column paths, that get no minimum and maximum in Parquet files.

Queries do not filter by them, and computing them takes time.
"""

_MAP: Final = pa.map_(pa.field("key", pa.string(), nullable=False), pa.string())
_TIME: Final = pa.timestamp("us", tz="UTC")

FIELDS: Final[dict[str, tuple[pa.DataType, str, bool]]] = {
    # name: Arrow type, SQL type of Spark, nullable
    "topic": (pa.string(), "string", False),
    "broker": (pa.string(), "string", True),
    "queue_id": (pa.int32(), "int", False),
    "queue_offset": (pa.int64(), "bigint", False),
    "message_id": (pa.string(), "string", False),
    "tags": (pa.string(), "string", True),
    "keys": (pa.string(), "string", True),
    "body": (pa.binary(), "binary", False),
    "properties": (_MAP, "map<string,string>", False),
    "born_timestamp": (_TIME, "timestamp", False),
    "store_timestamp": (_TIME, "timestamp", False),
    "reconsume_times": (pa.int32(), "int", False),
    "delay_level": (pa.int32(), "int", True),
    "deliver_timestamp": (_TIME, "timestamp", True),
    # only if `columns` names them
    "flag": (pa.int32(), "int", False),
    "sys_flag": (pa.int32(), "int", False),
    "born_host": (pa.string(), "string", False),
    "store_host": (pa.string(), "string", False),
    "offset_id": (pa.string(), "string", False),
    "commit_log_offset": (pa.int64(), "bigint", False),
    "transaction_id": (pa.string(), "string", True),
    DATE: (pa.date32(), "date", False),
}
DEFAULT_COLUMNS: Final = tuple(FIELDS)[:14]


def wanted_columns(text: str | None) -> tuple[str, ...]:
    """The option `columns`: names separated by commas, in the order wanted.

    None means DEFAULT_COLUMNS, `*` means all. Raises BadSetting.
    """
    if text is None:
        return DEFAULT_COLUMNS
    if text.strip() == "*":
        return tuple(FIELDS)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in FIELDS:
            raise BadSetting(
                f"columns: a message has no column {name!r}",
                hint=f"the columns are {', '.join(FIELDS)}",
            )
    if len(set(names)) < len(names):
        raise BadSetting(f"columns: {text!r} names a column twice")
    return names


def stored_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """The columns to read from records; includes `store_timestamp` if `date` needs it."""
    stored = tuple(name for name in columns if name != DATE)
    needed = DATE in columns and "store_timestamp" not in stored
    return (*stored, "store_timestamp") if needed else stored


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(n, FIELDS[n][0], nullable=FIELDS[n][2]) for n in columns])
