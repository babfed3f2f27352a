"""Parses JSON bodies into columns, and separates rows that do not match the schema.

A row is bad if its body is not UTF-8 or not a JSON object, if a value has the wrong type, or if a
column declared NOT NULL is missing. A value that does not match is never replaced by null. Fields
that the schema does not name are dropped.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import BadSetting
from penstock.spark.pipelines.lake.schema_text import HINT, check_names

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

REASON: Final = "reason"
_JSON: Final = "_penstock_json"
_TEXT: Final = "_penstock_text"
_CORRUPT: Final = "_penstock_corrupt"
BAD: Final = "_penstock_bad"
_HELPER_COLUMNS: Final = (_JSON, _TEXT, BAD)
_TRAILING_DATA: Final = r"[}\]](?:[\s,]*\{|\s*[^\s,\]}])"
"""Data after the end of an object; rarely matches inside of a valid JSON text, too."""


@dataclass(frozen=True)
class BodySchema:
    """The columns of a JSON body."""

    fields: "tuple[StructField, ...]"
    prefix: str = ""

    @classmethod
    def parse(cls, ddl: str, *, prefix: str = "", taken: Collection[str] = ()) -> "BodySchema":
        """From `id STRING NOT NULL, amount DOUBLE`; `taken` are the names of other columns."""
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType

        try:
            schema = StructType.fromDDL(ddl)
        except PySparkException as error:
            text = str(error).partition("SQLSTATE")[0].strip()
            raise BadSetting(f"the schema {ddl!r} can't be read: {text}", hint=HINT) from None
        if not isinstance(schema, StructType) or not schema.fields:
            raise BadSetting(f"the schema {ddl!r} has no columns", hint=HINT)
        names = [prefix + field.name for field in schema.fields]
        check_names(ddl, names, taken=taken)
        return cls(tuple(schema.fields), prefix)

    def parsed(self, messages: "DataFrame") -> "DataFrame":
        """The messages with their parsed bodies; the column `BAD` marks rows that do not match."""
        from pyspark.sql import functions as f

        text = messages.withColumn(_TEXT, f.col("body").cast("string"))
        options = {
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _CORRUPT,
            "allowSingleQuotes": "false",  # not valid in JSON
        }
        parsed = text.withColumn(_JSON, f.from_json(_TEXT, self._with_corrupt(), options))
        return parsed.withColumn(BAD, self._is_bad())

    def _is_bad(self) -> "Column":
        from pyspark.sql import functions as f

        bad = (
            f.col(_JSON).isNull()
            | f.col(f"{_JSON}.{_CORRUPT}").isNotNull()
            | ~f.is_valid_utf8(_TEXT)
            # Spark takes the first object of an array or of several objects and drops the rest.
            | f.ltrim(_TEXT).startswith("[")
            | self._has_trailing_data()
        )
        for field in self.fields:
            if not field.nullable:
                bad = bad | self.value(field).isNull()
        return bad

    def good(self, parsed: "DataFrame") -> "DataFrame":
        """The rows that match, with one column for each field instead of the body."""
        from pyspark.sql import functions as f

        columns = {self.prefix + field.name: self.value(field) for field in self.fields}
        rows = parsed.where(~f.col(BAD)).drop("body")
        return rows.select(
            *(f.col(f"`{name}`") for name in rows.columns if name not in _HELPER_COLUMNS),
            *(column.alias(name) for name, column in columns.items()),
        )

    def bad(self, parsed: "DataFrame") -> "DataFrame":
        """The rows that do not match, unchanged, with the reason."""
        from pyspark.sql import functions as f

        rows = parsed.where(BAD).withColumn(REASON, self.reason())
        return rows.select(
            *(f.col(f"`{name}`") for name in rows.columns if name not in _HELPER_COLUMNS)
        )

    def value(self, field: "StructField") -> "Column":
        """The parsed value of a field; null if it is missing or does not match."""
        from pyspark.sql import functions as f

        return f.col(_JSON)[field.name]

    def _has_trailing_data(self) -> "Column":
        """Whether data follows the first object.

        A body that looks so is parsed again as an array in which a 0 must be the second element.
        """
        from pyspark.sql import functions as f

        as_list = f.from_json(f.concat(f.lit("["), f.col(_TEXT), f.lit(",0]")), "array<string>")
        is_suspect = ~f.rtrim(_TEXT).endswith("}") | f.col(_TEXT).rlike(_TRAILING_DATA)
        return f.when(is_suspect, f.coalesce(f.size(as_list), f.lit(0)) != 2).otherwise(False)

    def _with_corrupt(self) -> "StructType":
        from pyspark.sql.types import StringType, StructField, StructType

        return StructType([*self.fields, StructField(_CORRUPT, StringType())])

    def reason(self) -> "Column":
        """Why a row is bad. There are few bad rows, so they may be parsed again."""
        from pyspark.sql import functions as f

        problems = []
        for field in self.fields:
            exists = f.get_json_object(_TEXT, f"$['{field.name}']").isNotNull()
            mismatch = self.value(field).isNull() & exists
            kind = field.dataType.simpleString()
            problems.append(f.when(mismatch, f.lit(f"{field.name} is not of type {kind}")))
            if not field.nullable:
                missing = self.value(field).isNull() & ~exists
                problems.append(f.when(missing, f.lit(f"{field.name} is missing")))
        found = f.concat_ws(", ", *problems)
        return (
            f.when(~f.is_valid_utf8(_TEXT), f.lit("the body is not UTF-8"))
            .when(f.trim(_TEXT) == "", f.lit("the body is empty"))
            .when(f.try_parse_json(_TEXT).isNull(), f.lit("the body is not JSON"))
            .when(f.json_object_keys(_TEXT).isNull(), f.lit("the body is not a JSON object"))
            .when(self._has_trailing_data(), f.lit("data follows the JSON object"))
            .when(found == "", f.lit("the body does not match the schema"))
            .otherwise(found)
        )
