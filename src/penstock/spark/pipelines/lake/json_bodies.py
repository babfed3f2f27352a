"""JSON bodies as columns: rows that fit a schema, and those that do not with the reason.

A row is bad if its body is no UTF-8, no JSON object, has a value that is not of the column's type,
or lacks what a column declared NOT NULL needs. Nothing is guessed, and nothing becomes null in
silence; fields that the schema does not name are left out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import BadSetting

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

REASON: Final = "reason"
_JSON: Final = "_penstock_json"
_TEXT: Final = "_penstock_text"
_CORRUPT: Final = "_penstock_corrupt"
BAD: Final = "_penstock_bad"
_OURS: Final = (_JSON, _TEXT, BAD)
_MORE: Final = r"[}\]](?:[\s,]*\{|\s*[^\s,\]}])"
"""One object ends and something begins: also inside of a JSON text, but rarely."""


@dataclass(frozen=True)
class BodySchema:
    """The columns that a body is taken apart into."""

    fields: "tuple[StructField, ...]"
    prefix: str = ""

    @classmethod
    def parse(cls, ddl: str, *, prefix: str = "", taken: Collection[str] = ()) -> "BodySchema":
        """From `id STRING NOT NULL, amount DOUBLE`; `taken` are names that other columns have."""
        from pyspark.errors import PySparkException
        from pyspark.sql.types import StructType

        hint = 'for example "id STRING NOT NULL, amount DOUBLE, items ARRAY<STRING>"'
        try:
            schema = StructType.fromDDL(ddl)
        except PySparkException as error:
            text = str(error).partition("SQLSTATE")[0].strip()
            raise BadSetting(f"the schema {ddl!r} can't be read: {text}", hint=hint) from None
        if not isinstance(schema, StructType) or not schema.fields:
            raise BadSetting(f"the schema {ddl!r} has no columns", hint=hint)
        names = [prefix + field.name for field in schema.fields]
        lower = {name.lower() for name in taken}
        clash = [name for name in names if name.lower() in lower]
        if clash:
            raise BadSetting(
                f"the schema has {', '.join(clash)}, as the messages themselves have",
                hint="leave those columns out (--columns), or put a --prefix before the schema's",
            )
        if len({name.lower() for name in names}) < len(names):
            raise BadSetting(f"the schema {ddl!r} names a column twice")
        return cls(tuple(schema.fields), prefix)

    def parsed(self, messages: "DataFrame") -> "DataFrame":
        """The messages with what was made of their bodies; the column `BAD` tells if it fits."""
        from pyspark.sql import functions as f

        text = messages.withColumn(_TEXT, f.col("body").cast("string"))
        options = {
            "mode": "PERMISSIVE",
            "columnNameOfCorruptRecord": _CORRUPT,
            "allowSingleQuotes": "false",  # JSON has none
        }
        parsed = text.withColumn(_JSON, f.from_json(_TEXT, self._with_corrupt(), options))
        return parsed.withColumn(BAD, self._is_bad())

    def _is_bad(self) -> "Column":
        from pyspark.sql import functions as f

        bad = (
            f.col(_JSON).isNull()
            | f.col(f"{_JSON}.{_CORRUPT}").isNotNull()
            | ~f.is_valid_utf8(_TEXT)
            # Of an array, or of several objects, Spark takes the first and forgets the rest.
            | f.ltrim(_TEXT).startswith("[")
            | self._has_more()
        )
        for field in self.fields:
            if not field.nullable:
                bad = bad | self.value(field).isNull()
        return bad

    def good(self, parsed: "DataFrame") -> "DataFrame":
        """Rows that fit: the other columns, and one for each field instead of the body."""
        from pyspark.sql import functions as f

        columns = {self.prefix + field.name: self.value(field) for field in self.fields}
        rows = parsed.where(~f.col(BAD)).drop("body")
        return rows.select(
            *(f.col(f"`{name}`") for name in rows.columns if name not in _OURS),
            *(column.alias(name) for name, column in columns.items()),
        )

    def bad(self, parsed: "DataFrame") -> "DataFrame":
        """Rows that do not fit, as they came, with the reason."""
        from pyspark.sql import functions as f

        rows = parsed.where(BAD).withColumn(REASON, self.reason())
        return rows.select(*(f.col(f"`{name}`") for name in rows.columns if name not in _OURS))

    def value(self, field: "StructField") -> "Column":
        from pyspark.sql import functions as f

        return f.col(_JSON)[field.name]

    def _has_more(self) -> "Column":
        """Whether something follows the first object; only where it looks so is it parsed again,
        with a 0 behind it that has to be the second."""
        from pyspark.sql import functions as f

        as_list = f.from_json(f.concat(f.lit("["), f.col(_TEXT), f.lit(",0]")), "array<string>")
        looks_so = ~f.rtrim(_TEXT).endswith("}") | f.col(_TEXT).rlike(_MORE)
        return f.when(looks_so, f.coalesce(f.size(as_list), f.lit(0)) != 2).otherwise(f.lit(False))

    def _with_corrupt(self) -> "StructType":
        from pyspark.sql.types import StringType, StructField, StructType

        return StructType([*self.fields, StructField(_CORRUPT, StringType())])

    def reason(self) -> "Column":
        """In words. Bad rows are few, so this may parse them once more."""
        from pyspark.sql import functions as f

        faults = []
        for field in self.fields:
            there = f.get_json_object(_TEXT, f"$['{field.name}']").isNotNull()
            misfit = self.value(field).isNull() & there
            kind = field.dataType.simpleString()
            faults.append(f.when(misfit, f.lit(f"{field.name} is no {kind}")))
            if not field.nullable:
                missing = self.value(field).isNull() & ~there
                faults.append(f.when(missing, f.lit(f"{field.name} is missing")))
        found = f.concat_ws(", ", *faults)
        return (
            f.when(~f.is_valid_utf8(_TEXT), f.lit("the body is no UTF-8"))
            .when(f.trim(_TEXT) == "", f.lit("the body is empty"))
            .when(f.try_parse_json(_TEXT).isNull(), f.lit("the body is no JSON"))
            .when(f.json_object_keys(_TEXT).isNull(), f.lit("the body is no JSON object"))
            .when(self._has_more(), f.lit("something follows the JSON object"))
            .when(found == "", f.lit("the body does not fit the schema"))
            .otherwise(found)
        )
