"""What mqadmin prints, without what is another each time: addresses, ids, times, rates, sizes."""

from __future__ import annotations

import re

from .clusters import Cluster
from .mqadmin_shell import Printed

_VARYING = (
    (r"\d{4}-\d\d-\d\d[ ,#]\d\d:\d\d:\d\d([,:.]\d{3})?", "TIME"),
    (r"\b127\.0\.0\.1:\d+", "ADDRESS"),
    (r"\b\d+\.\d+\.\d+\.\d+@", "CLIENT@"),
    # Of a message: of 16 bytes (the broker's or an old client's) or of 28.
    (r"\b([0-9A-F]{32}|[0-9A-F]{56})\b", "ID"),
    (r"\b1\d{12}\b", "MS"),
    # Of the client or of the broker.
    (r"\bV\d+_\d+_\d+\b", "VERSION"),
)
# The text of a refusal is its server's own; the code is what counts.
_REFUSAL = re.compile(r"CODE: (\d+)\s+DESC: .*")
_FRAME = re.compile(r"\s+(at |\.\.\. )|See https|For more information")


def plain_lines(text: str, cluster: Cluster) -> list[str]:
    """The lines, with every run of blanks as one and without empty lines."""
    text = text.replace(cluster.namesrv, "NAMES").replace(cluster.broker_address, "BROKER")
    for pattern, word in _VARYING:
        text = re.sub(pattern, word, text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def plain_error(printed: Printed, cluster: Cluster) -> list[str]:
    """What a failed command says of its cause; no stack, no remark."""
    kept = "\n".join(line for line in printed.err.splitlines() if not _FRAME.match(line))
    return [_REFUSAL.sub(r"CODE: \1", line) for line in plain_lines(kept, cluster)]


def refusal(printed: Printed) -> int | None:
    """The code of the refusal that ended the command; None if it went well."""
    if not printed.err:
        return None
    found = _REFUSAL.search(printed.err)
    return int(found.group(1)) if found else -1


def has(lines: list[str], fact: str) -> bool:
    """Whether a line says it: the whole line, where … stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, fact.split("…"))))
    return any(pattern.fullmatch(line) for line in lines)
