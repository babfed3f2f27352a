"""The columns of a message as a schema of Spark."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.arrow.message_schema import FIELDS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def spark_schema(columns: Sequence[str]) -> "StructType":
    """The schema for Spark; built by hand, because workers have no session that parses DDL."""
    from pyspark.sql import types

    plain: dict[str, types.DataType] = {
        "string": types.StringType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "binary": types.BinaryType(),
        "timestamp": types.TimestampType(),
        "date": types.DateType(),
        "map<string,string>": types.MapType(types.StringType(), types.StringType()),
    }
    return types.StructType(
        [types.StructField(n, plain[FIELDS[n][1]], nullable=FIELDS[n][2]) for n in columns]
    )
