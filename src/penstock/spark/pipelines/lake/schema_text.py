"""Checks the text of a schema before Spark is started, which parses it later.

Only what is certainly wrong is refused here: a column without a type, a type that Spark does not
have, brackets that do not match, names that are taken or repeated.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from penstock.errors import BadSetting

HINT: Final = 'for example "id STRING NOT NULL, amount DOUBLE, items ARRAY<STRING>"'
TYPES: Final = frozenset(
    (
        *("array", "bigint", "binary", "boolean", "byte", "char", "character", "date", "dec"),
        *("decimal", "double", "float", "geography", "geometry", "int", "integer", "interval"),
        *("long", "map", "null", "numeric", "object", "real", "short", "smallint", "string"),
        *("struct", "time", "timestamp", "timestamp_ltz", "timestamp_ntz", "tinyint", "varchar"),
        *("variant", "void"),
    )
)
"""The first words of Spark's types."""
_COLUMN: Final = re.compile(r"(`(?:[^`]|``)+`|\w+)(?:\s*:\s*|\s+)(\w+)")


def check_schema_text(ddl: str, *, prefix: str = "", taken: Collection[str] = ()) -> None:
    """Raise BadSetting for a text such as `id STRING NOT NULL, amount` that can't be a schema."""
    names = []
    for part in _parts(ddl):
        column = _COLUMN.match(part)
        if column is None:
            raise _unreadable(ddl, f"{part!r} is not a name and a type")
        name, kind = column.groups()
        if kind.lower() not in TYPES:
            raise _unreadable(ddl, f"there is no type {kind!r}")
        names.append(prefix + (name[1:-1].replace("``", "`") if name.startswith("`") else name))
    check_names(ddl, names, taken=taken)


def check_names(ddl: str, names: Sequence[str], *, taken: Collection[str]) -> None:
    """Raise BadSetting if names of columns are repeated, or are those of other columns."""
    lower = {name.lower() for name in taken}
    if clash := [name for name in names if name.lower() in lower]:
        raise BadSetting(
            f"the schema names {', '.join(clash)}, which are columns of messages",
            hint="leave these columns out with --columns, or use --prefix",
        )
    if len({name.lower() for name in names}) < len(names):
        raise BadSetting(f"the schema {ddl!r} names a column twice")


def _parts(ddl: str) -> Iterator[str]:
    """The columns of the text: commas inside brackets and quotes do not separate them."""
    start = depth = 0
    quote = ""
    for at, letter in enumerate(ddl):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "`'\"":
            quote = letter
        elif letter in "<(":
            depth += 1
        elif letter in ">)":
            depth -= 1
        elif letter == "," and depth == 0:
            yield ddl[start:at].strip()
            start = at + 1
    if depth or quote:
        raise _unreadable(ddl, "brackets or quotes do not match")
    yield ddl[start:].strip()


def _unreadable(ddl: str, why: str) -> BadSetting:
    return BadSetting(f"the schema {ddl!r} can't be read: {why}", hint=HINT)
