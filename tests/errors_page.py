"""Writes docs/errors.md from penstock.errors: `python -m tests.errors_page`."""

from pathlib import Path

from penstock import errors
from penstock.errors import PenstockError
from penstock.wire.codes import response_name

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
HEAD = """# Errors

<!-- Written by `python -m tests.errors_page` from src/penstock/errors.py: change it there. -->

Whatever goes wrong and is known by name is one of these. A client gets the response code and a
remark: what happened, with figure, limit and setting where there is a limit, and the next step. A
command prints the same in one line and exits with 1. `penstock_refused_total` counts by these names
([metrics](metrics.md)).

*Retry* means: the same request may succeed later, or on another broker.

| Error | Response code | Retry | What it is | Next step |
|---|---|---|---|---|
"""


def error_classes() -> list[type[PenstockError]]:
    """All classes of the tree, in the order of the file."""
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PenstockError)
    ]


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(_row, error_classes()))


def _row(kind: type[PenstockError]) -> str:
    what = " ".join((kind.__doc__ or "").split())
    retry = "yes" if kind.retry else ""
    return f"| `{kind.__name__}` | {response_name(kind.code)} | {retry} | {what} | {kind.hint} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
