"""Large tables page by page, as slaves and tools of 5.3 and later ask for them.

They send the version that their pages so far belong to. If the table has changed since, or no
version is given, they get the first page again and start over.
"""

from collections.abc import Iterable

from penstock.rpc.command import Command
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion

PAGE_MAX = 2_000
"""Entries of one page, as in RocketMQ (splitMetadataSize)."""


def page_names(
    command: Command, names: Iterable[str], version: DataVersion, *, first: str, most: str
) -> list[str] | None:
    """The names of the page asked for, or None: the request knows no pages and wants all.

    `first` and `most` are the header fields with the number of the first entry and the page's size.
    """
    if not any(command.ext.get(field) for field in ("dataVersion", first, most)):
        return None
    begin = max(command.i32_or(first, 0), 0)
    count = max(min(command.i32_or(most, PAGE_MAX), PAGE_MAX), 0)
    given = command.text_or("dataVersion")
    if not given.strip() or fastjson.decode(given.encode(), DataVersion) != version:
        begin = 0
    return sorted(names)[begin : begin + count]
