"""Sorting and paging of rows. Rows without the value come last in both directions."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from penstock.console.endpoints import ApiCall
from penstock.errors import InvalidParameter

T = TypeVar("T")

PAGE_SIZE = 50
PAGE_SIZE_MAX = 500
PARAMETERS: Mapping[str, str] = {
    "query": "text that the name contains",
    "sort": "the member to sort by; name by default",
    "descending": "1: the largest first",
    "page": "the number of the page, from 0 on",
    "size": "rows of a page, up to 500; 50 by default",
}


def page_of(
    call: ApiCall,
    items: Iterable[T],
    keys: Mapping[str, Callable[[T], Any]],
    row: Callable[[T], Any],
) -> dict[str, object]:
    """One page of items; `keys` are the members that can be sorted by."""
    found = list(items)
    sort = call.text("sort", "name")
    key = keys.get(sort)
    if key is None:
        raise InvalidParameter(
            f"sort: {sort[:40]!r} is not possible", hint=f"use {', '.join(keys)}"
        )
    known = [item for item in found if key(item) is not None]
    unknown = [item for item in found if key(item) is None]
    known.sort(key=key, reverse=call.flag("descending"))
    size = call.number("size", PAGE_SIZE, least=1, most=PAGE_SIZE_MAX)
    page = call.number("page", 0, most=1_000_000)
    rows = (known + unknown)[page * size : (page + 1) * size]
    return {"matched": len(found), "page": page, "size": size, "rows": [row(i) for i in rows]}
