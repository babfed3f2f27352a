"""The base of the Structs that commands print with `--json`, and the description of their fields.

Rules of all of them: an unknown value is null, never 0; times are milliseconds since 1970 and end
in `_ms`; names are snake_case. Fields may be added; a field is not renamed or removed, and its type
does not change. The names of Structs are unique, because the documentation has them on one page. If
a class of another package has the name too, the Struct's name ends in `Output`, which the schema
leaves out.
"""

from dataclasses import dataclass
from typing import Any

import msgspec


class JsonValue(msgspec.Struct):
    """A JSON object. The docstring of a subclass says what it is."""


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """What one command prints with `--json`."""

    value: Any
    """The type of the value."""
    lines: bool = False
    """Whether it prints one value per line, instead of one indented value."""
    dry_run: Any = None
    """The type of the value with `--dry-run`, if it is another one."""


def doc(text: str) -> msgspec.Meta:
    """The description of a field: `Annotated[int, doc("…")]`."""
    return msgspec.Meta(description=text)
