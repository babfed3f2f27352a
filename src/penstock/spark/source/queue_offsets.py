"""Offsets of many queues: their JSON, limits per batch, and what went missing. Nobody is asked.

In Spark's checkpoints, in options and in progress reports offsets are
`{"topic": {"broker-a": {"0": 23, "1": 5}}}`, each the offset of the next message to read. In
options -2 stands for the first message that is there, -1 for the end.

The end of a batch also says where queues begin that the batch before did not read, under `INITIAL`,
a name that no topic can have: all queues for a stream's first batch, later on those that are new. A
batch that has to be run again reads the same, and `latest` or `earliest` are elsewhere by then.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from penstock.errors import BadSetting, DataLost
from penstock.wire.bodies.client_bodies import MessageQueue

log = logging.getLogger(__name__)

EARLIEST: Final = -2
LATEST: Final = -1
INITIAL: Final = "$initial"
SHOWN_MAX: Final = 10

Json: TypeAlias = dict[str, Any]
QueueOffsets: TypeAlias = Mapping[MessageQueue, int]
"""An offset for each queue; topics are named without the namespace."""
Start: TypeAlias = str | int | QueueOffsets
"""`earliest`, `latest`, milliseconds since 1970, or offsets."""
Assignment: TypeAlias = Mapping[str, Mapping[str, tuple[int, ...]]]

_OFFSET_MAX: Final = 2**63 - 1
_QUEUE_MAX: Final = 2**31 - 1
_EXAMPLE: Final = '{"orders": {"broker-a": {"0": 23, "1": -2}}}'


# --- text ----------------------------------------------------------------------------------------


def parse_start(text: str, option: str) -> Start:
    """The option startingOffsets or endingOffsets; raises BadSetting."""
    word = text.lower()
    if word in ("earliest", "latest"):
        return word
    if not text.startswith("{"):
        raise BadSetting(
            f"the option {option} is {text[:80]!r}",
            hint=f"give earliest, latest, or offsets such as {_EXAMPLE}",
        )
    marks = _marks(_json(text, option), option, least=EARLIEST)
    if not marks:
        raise BadSetting(f"the option {option} has no queue", hint=f"for example {_EXAMPLE}")
    return marks


def parse_assignment(text: str) -> Assignment:
    """The option assign: `{"topic": {"broker-a": [0, 1]}}`; raises BadSetting."""
    hint = 'for example {"orders": {"broker-a": [0, 1]}}'
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for topic, brokers in _json(text, "assign").items():
        if not isinstance(brokers, dict) or not brokers:
            raise BadSetting(f"assign: {topic!r} names no brokers", hint=hint)
        for broker, numbers in brokers.items():
            if not isinstance(numbers, list) or not numbers or not all(map(_is_queue, numbers)):
                raise BadSetting(f"assign: {broker!r} of {topic!r} names no queues", hint=hint)
            found.setdefault(topic, {})[broker] = tuple(sorted(set(numbers)))
    if not found:
        raise BadSetting("assign names no topic", hint=hint)
    return found


def to_json(marks: QueueOffsets, initial: QueueOffsets | None = None) -> Json:
    """Offsets for Spark, always in the same order: Spark compares their text."""
    found: Json = {}
    if initial is not None:
        found[INITIAL] = to_json(initial)
    for queue, offset in sorted(marks.items()):
        brokers = found.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return found


def from_json(offsets: Json) -> dict[MessageQueue, int]:
    """Offsets that Spark kept; raises BadSetting where they are not ours."""
    return _marks({k: v for k, v in offsets.items() if k != INITIAL}, "the checkpoint", least=0)


def initial_in(offsets: Json) -> dict[MessageQueue, int] | None:
    """Where the queues begin that are new in the batch that ends here."""
    return from_json(offsets[INITIAL]) if INITIAL in offsets else None


def _json(text: str, option: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"the option {option} is no JSON: {error}", hint=_EXAMPLE) from None
    if not isinstance(value, dict):
        raise BadSetting(f"the option {option} is no JSON object", hint=_EXAMPLE)
    return value


def _marks(offsets: Json, where: str, *, least: int) -> dict[MessageQueue, int]:
    found = {}
    for topic, brokers in offsets.items():
        for broker, numbers in _table(brokers, where).items():
            for number, offset in _table(numbers, where).items():
                if not (number.isascii() and number.isdigit() and len(number) < 10):
                    raise BadSetting(f"{where}: {number[:20]!r} is no queue", hint=_EXAMPLE)
                is_number = isinstance(offset, int) and not isinstance(offset, bool)
                if not is_number or not least <= offset <= _OFFSET_MAX:
                    raise BadSetting(
                        f"{where}: the offset of {topic}/{broker}/{number} is {str(offset)[:40]}",
                        hint="-2 is the first message, -1 the end" if least < 0 else None,
                    )
                found[MessageQueue(topic, broker, int(number))] = offset
    return found


def _table(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadSetting(f"{where}: {str(value)[:40]} should be an object", hint=_EXAMPLE)
    return value


def _is_queue(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _QUEUE_MAX


# --- how much of it ------------------------------------------------------------------------------


def rows_between(start: QueueOffsets, end: QueueOffsets) -> int:
    """Messages from `start` to `end`; queues that `start` does not have are left out."""
    return sum(max(end[queue] - start[queue], 0) for queue in start.keys() & end.keys())


def limited(start: QueueOffsets, end: QueueOffsets, rows_max: int) -> dict[MessageQueue, int]:
    """The end of a batch of at most so many messages, spread over the queues by what they have.

    Every queue with messages gets its turn: at least one of each where there are enough, else as
    many queues as there are messages to give, others the next time.
    """
    sizes = {q: end[q] - start[q] for q in sorted(end) if end[q] > start.get(q, end[q])}
    if sum(sizes.values()) <= rows_max:
        return dict(end)
    queues = list(sizes)
    if rows_max < len(queues):
        turn = sum(start[queue] for queue in queues) % len(queues)
        shares = dict.fromkeys((queues[turn:] + queues[:turn])[:rows_max], 1)
    else:
        shares = _shares(sizes, rows_max)
    return {q: start[q] + shares.get(q, 0) if q in sizes else end[q] for q in end}


def _shares(sizes: Mapping[MessageQueue, int], rows: int) -> dict[MessageQueue, int]:
    """One for each, the rest in proportion, what rounding leaves to those that come short most."""
    rows -= len(sizes)
    rest = {queue: size - 1 for queue, size in sizes.items()}
    total = sum(rest.values())
    shares = {queue: 1 + size * rows // total for queue, size in rest.items()}
    left = rows + len(sizes) - sum(shares.values())
    for queue in sorted(rest, key=lambda queue: -(rest[queue] * rows % total))[:left]:
        shares[queue] += 1
    return shares


# --- what is missing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages of a queue that should be read and are not there; how many may be unknown."""

    queue: MessageQueue
    rows: int | None
    what: str

    def __str__(self) -> str:
        queue = self.queue
        return f"{queue.topic}, queue {queue.queue_id} at {queue.broker_name}: {self.what}"


def gone_back(start: QueueOffsets, end: QueueOffsets) -> list[Loss]:
    """Queues that end before the place where a query has come to."""
    return [
        Loss(queue, None, f"it was read up to offset {start[queue]} and ends at {end[queue]} now")
        for queue in sorted(start.keys() & end.keys())
        if end[queue] < start[queue]
    ]


def spans(
    start: QueueOffsets, end: QueueOffsets, begins: QueueOffsets, ends: QueueOffsets
) -> tuple[dict[MessageQueue, tuple[int, int]], list[Loss]]:
    """First and last offsets to read of each queue that has messages, and what is not there.

    `begins` and `ends` are what brokers have now. A queue that is new begins at its first message;
    one that went back begins anew, which `gone_back` has told before.
    """
    found: dict[MessageQueue, tuple[int, int]] = {}
    losses: list[Loss] = []
    for queue, until in sorted(end.items()):
        begin, there = begins.get(queue, 0), ends.get(queue, until)
        first = start.get(queue, begin)
        if first > until:
            first = begin
        if first < min(begin, until):
            losses.append(_missing(queue, first, min(begin, until), f"the first there is {begin}"))
            first = min(begin, until)
        if there < until:
            losses.append(_missing(queue, max(first, there), until, f"the queue ends at {there}"))
            until = there
        if first < until:
            found[queue] = (first, until)
    return found, losses


def _missing(queue: MessageQueue, first: int, until: int, there: str) -> Loss:
    return Loss(queue, until - first, f"offsets {first} to {until - 1} are not there, {there}")


def listed(queues: Iterable[MessageQueue]) -> str:
    """Queues for a message: `orders broker-a 0 1 2; bills broker-b 3`."""
    found: dict[tuple[str, str], list[str]] = {}
    for queue in sorted(queues):
        found.setdefault((queue.topic, queue.broker_name), []).append(str(queue.queue_id))
    return "; ".join(f"{topic} {name} {' '.join(ids)}" for (topic, name), ids in found.items())


def resolved(
    wanted: QueueOffsets, begins: QueueOffsets, ends: QueueOffsets, option: str
) -> dict[MessageQueue, int]:
    """Offsets of an option, -2 and -1 replaced; raises BadSetting where a queue has no such, where
    there is no such queue, and where a queue that is read is not named."""
    unknown, missing = wanted.keys() - ends.keys(), ends.keys() - wanted.keys()
    if unknown:
        raise BadSetting(
            f"{option}: there is no {listed(unknown)}", hint=f"there are {listed(ends)}"
        )
    if missing:
        raise BadSetting(
            f"{option} does not tell where to begin or end in {listed(missing)}",
            hint="name all queues that are read; -2 is the first message, -1 the end",
        )
    found = {}
    for queue, offset in wanted.items():
        known = {EARLIEST: begins[queue], LATEST: ends[queue]}
        found[queue] = known.get(offset, offset)
        if found[queue] > ends[queue]:
            raise BadSetting(
                f"{option}: the offset {offset} of {listed([queue])} is after its end, "
                f"{ends[queue]}",
                hint=f"give {begins[queue]} to {ends[queue]}, -2 or -1",
            )
    return found


def report(losses: Sequence[Loss], *, fail: bool) -> None:
    """Raise DataLost with all that is missing, or log it: the first ten queues of many."""
    shown = "; ".join(str(loss) for loss in losses[:SHOWN_MAX])
    if len(losses) > SHOWN_MAX:
        shown += f"; and {len(losses) - SHOWN_MAX} queues more"
    count = sum(loss.rows or 0 for loss in losses)
    if any(loss.rows is None for loss in losses):
        text = f"messages may be lost, as topics were deleted or brokers lost their ends: {shown}"
    else:
        text = f"{count} messages are lost: {shown}"
    if fail:
        raise DataLost(text)
    log.warning("%s (failOnDataLoss=false: the query goes on)", text)
