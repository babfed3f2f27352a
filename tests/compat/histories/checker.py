"""Judges a history: a pure function from records to violations.

What must hold, with an in-sync set of at least two and no unclean election:

* Every acknowledged message is in the last read of the master, where it was acknowledged.
* No two sends are acknowledged at the same place with different bodies.
* A producer's acknowledged sends to one queue are stored in the order in which they were sent.
* Nothing that was refused is stored, and a message that was sent once is stored at most once.
* What a reader or a consumer saw at a place, at the master or at a slave, is there in the end.
* A queue has no gaps, and all replicas have the same messages.
* The consumer of a group received every acknowledged message at least once.

Stored duplicates of a message that was sent several times are allowed, and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from tests.compat.histories.history import (
    Delivery,
    Final,
    History,
    QueueEnd,
    Read,
    Send,
)

SHOWN_MAX = 5
"""Examples in the text of a violation."""

Place = tuple[str, int]
"""A queue and an offset in it."""
Contents = dict[Place, str]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Violation(NamedTuple):
    """A promise that was broken."""

    kind: str
    text: str


class Counts(NamedTuple):
    """Figures of a history, for its summary."""

    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    stored_although_unknown: int = 0
    duplicates: int = 0
    """Stored messages beyond the first one of each body."""
    reads: int = 0
    delivered_again: int = 0


class Verdict(NamedTuple):
    violations: list[Violation]
    counts: Counts


def check(history: History) -> Verdict:
    """Judge a history that ends with the last read of all replicas."""
    sends = [record for record in history if isinstance(record, Send)]
    finals = [record for record in history if isinstance(record, Final)]
    contents: Contents = {(one.queue, one.offset): one.body for one in finals if one.master}
    violations = [
        *_lost(sends, contents),
        *_same_place(sends),
        *_reordered(sends),
        *_stored_wrongly(sends, contents),
        *_replaced(history, contents),
        *_gaps(history, contents),
        *_replicas_differ(finals, contents),
        *_not_delivered(history, sends),
    ]
    return Verdict(violations, _count(history, sends, contents))


def _acknowledged(sends: Iterable[Send]) -> Iterator[Send]:
    return (one for one in sends if one.outcome == "acknowledged")


def _violation(kind: str, explanation: str, found: list[str]) -> Iterator[Violation]:
    if found:
        more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        yield Violation(kind, f"{len(found)} {explanation}: {'; '.join(found[:SHOWN_MAX])}{more}")


def _lost(sends: Iterable[Send], contents: Contents) -> Iterator[Violation]:
    found = []
    for one in _acknowledged(sends):
        stored = contents.get((one.queue, one.offset))
        if stored != one.body:
            instead = "nothing" if stored is None else stored
            found.append(f"{one.body} at {one.queue}:{one.offset}, there is {instead}")
    return _violation("lost", "acknowledged messages are lost", found)


def _same_place(sends: Iterable[Send]) -> Iterator[Violation]:
    bodies = _grouped(((one.queue, one.offset), one.body) for one in _acknowledged(sends))
    found = [
        f"{queue}:{offset}: {', '.join(sorted(set(many)))}"
        for (queue, offset), many in bodies.items()
        if len(set(many)) > 1
    ]
    return _violation("same place", "places were acknowledged for several messages", found)


def _reordered(sends: Iterable[Send]) -> Iterator[Violation]:
    found = []
    last: dict[tuple[str, str], Send] = {}
    for one in _acknowledged(sends):
        before = last.get((one.producer, one.queue))
        if before is not None and one.offset <= before.offset:
            found.append(
                f"{one.producer} in {one.queue}: {before.body} at {before.offset}, "
                f"then {one.body} at {one.offset}"
            )
        last[one.producer, one.queue] = one
    return _violation("reordered", "messages are not in the order of their producer", found)


def _stored_wrongly(sends: Iterable[Send], contents: Contents) -> Iterator[Violation]:
    places = _grouped(((queue, body), offset) for (queue, offset), body in contents.items())
    refused, twice = [], []
    for one in sends:
        offsets = sorted(places.get((one.queue, one.body), ()))
        where = f"{one.body} at {one.queue}:{', '.join(map(str, offsets))}"
        if one.outcome == "failed" and offsets:
            refused.append(f"{where} ({one.detail})")
        if one.attempts_max == 1 and len(offsets) > 1:
            twice.append(where)
    known = {(one.queue, one.body) for one in sends}
    invented = [f"{body} in {queue}" for queue, body in places if (queue, body) not in known]
    yield from _violation("refused but stored", "refused messages are stored", refused)
    yield from _violation("stored twice", "messages that were sent once are stored twice", twice)
    yield from _violation("invented", "messages were never sent", invented)


def _replaced(history: History, contents: Contents) -> Iterator[Violation]:
    found: dict[str, None] = {}
    for one in history:
        if isinstance(one, Read | Delivery):
            stored = contents.get((one.queue, one.offset))
            if stored != one.body:
                who = one.reader if isinstance(one, Read) else one.group
                instead = "nothing" if stored is None else stored
                text = f"{who} saw {one.body} at {one.queue}:{one.offset}, later there is {instead}"
                found[text] = None
    return _violation("replaced", "messages that were seen are no longer there", list(found))


def _gaps(history: History, contents: Contents) -> Iterator[Violation]:
    ends = [one for one in history if isinstance(one, QueueEnd) and one.master]
    found = []
    for end in ends:
        missing = [
            offset
            for offset in range(end.min_offset, end.max_offset)
            if (end.queue, offset) not in contents
        ]
        if missing:
            found.append(
                f"{end.queue} lacks {missing[:SHOWN_MAX]} of {end.min_offset}-{end.max_offset - 1}"
            )
        if end.min_offset != 0:
            found.append(f"{end.queue} begins at {end.min_offset}")
    limits = {end.queue: end.max_offset for end in ends}
    beyond = [f"{q}:{offset}" for q, offset in contents if offset >= limits.get(q, 2**63)]
    return _violation("gap", "queues have gaps", found + beyond)


def _replicas_differ(finals: Iterable[Final], contents: Contents) -> Iterator[Violation]:
    replicas: dict[str, Contents] = defaultdict(dict)
    for one in finals:
        if not one.master:
            replicas[one.replica][one.queue, one.offset] = one.body
    found = []
    for name, seen in replicas.items():
        places = sorted(
            place
            for place in seen.keys() | contents.keys()
            if seen.get(place) != contents.get(place)
        )
        found += [
            f"{queue}:{offset} is {seen.get((queue, offset))} at {name}, "
            f"{contents.get((queue, offset))} at the master"
            for queue, offset in places
        ]
    return _violation("replicas differ", "messages differ between replicas", found)


def _not_delivered(history: History, sends: Iterable[Send]) -> Iterator[Violation]:
    """Groups that received nothing at all did not take part."""
    received = _grouped(
        (one.group, (one.queue, one.body)) for one in history if isinstance(one, Delivery)
    )
    for group, several in received.items():
        queues = {queue.rpartition("/")[0] for queue, _ in several}
        seen = set(several)
        missing = [
            f"{one.body} at {one.queue}:{one.offset}"
            for one in _acknowledged(sends)
            if one.queue.rpartition("/")[0] in queues and (one.queue, one.body) not in seen
        ]
        yield from _violation(
            "not delivered", f"acknowledged messages did not reach the group {group}", missing
        )


def _count(history: History, sends: list[Send], contents: Contents) -> Counts:
    bodies = {(queue, body) for (queue, _), body in contents.items()}
    delivered = [(one.group, one.queue, one.offset) for one in history if isinstance(one, Delivery)]
    unknown = [one for one in sends if one.outcome == "unknown"]
    return Counts(
        acknowledged=sum(one.outcome == "acknowledged" for one in sends),
        failed=sum(one.outcome == "failed" for one in sends),
        unknown=len(unknown),
        stored_although_unknown=sum((one.queue, one.body) in bodies for one in unknown),
        duplicates=len(contents) - len(bodies),
        reads=sum(isinstance(one, Read) for one in history),
        delivered_again=len(delivered) - len(set(delivered)),
    )


def _grouped(pairs: Iterable[tuple[K, V]]) -> Mapping[K, list[V]]:
    groups: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups
