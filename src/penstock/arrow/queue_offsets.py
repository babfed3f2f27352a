"""Offsets of many queues: their JSON, limits per batch, and missing messages. No I/O.

In Spark's checkpoints, in options and in progress reports, offsets are
`{"topic": {"broker-a": {"0": 23, "1": 5}}}`: each is the offset of the next message to read. In
options, -2 stands for the first existing message and -1 for the end.

The end of a batch also has the starting offsets of queues that the previous batch did not read,
under `INITIAL`, which is not a valid topic name: all queues for a stream's first batch, later only
new ones. So a batch that is repeated reads the same messages, although `latest` or `earliest` have
moved.
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

OffsetsJson: TypeAlias = dict[str, Any]
QueueOffsets: TypeAlias = Mapping[MessageQueue, int]
"""An offset for each queue; topics without the namespace."""
OffsetSpec: TypeAlias = str | int | QueueOffsets
"""`earliest`, `latest`, milliseconds since 1970, or offsets."""
Assignment: TypeAlias = Mapping[str, Mapping[str, tuple[int, ...]]]

_OFFSET_MAX: Final = 2**63 - 1
_QUEUE_MAX: Final = 2**31 - 1
_EXAMPLE: Final = '{"orders": {"broker-a": {"0": 23, "1": -2}}}'


# --- JSON ----------------------------------------------------------------------------------------


def parse_offset_spec(text: str, option: str) -> OffsetSpec:
    """The option startingOffsets or endingOffsets; raises BadSetting."""
    word = text.lower()
    if word in ("earliest", "latest"):
        return word
    if not text.startswith("{"):
        raise BadSetting(
            f"the option {option} is {text[:80]!r}",
            hint=f"set earliest, latest, or offsets such as {_EXAMPLE}",
        )
    offsets = _parse_offsets(_json(text, option), option, least=EARLIEST)
    if not offsets:
        raise BadSetting(f"the option {option} has no queue", hint=f"for example {_EXAMPLE}")
    return offsets


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


def to_json(offsets: QueueOffsets, initial: QueueOffsets | None = None) -> OffsetsJson:
    """Offsets for Spark, sorted, because Spark compares their text."""
    found: OffsetsJson = {}
    if initial is not None:
        found[INITIAL] = to_json(initial)
    for queue, offset in sorted(offsets.items()):
        brokers = found.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    return found


def from_json(offsets: OffsetsJson) -> dict[MessageQueue, int]:
    """Offsets from Spark's checkpoint; raises BadSetting if they are not valid."""
    return _parse_offsets(
        {k: v for k, v in offsets.items() if k != INITIAL}, "the checkpoint", least=0
    )


def initial_in(offsets: OffsetsJson) -> dict[MessageQueue, int] | None:
    """The starting offsets of queues that are new in the batch that ends here."""
    return from_json(offsets[INITIAL]) if INITIAL in offsets else None


def _json(text: str, option: str) -> OffsetsJson:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"the option {option} is not valid JSON: {error}", hint=_EXAMPLE) from None
    if not isinstance(value, dict):
        raise BadSetting(f"the option {option} is not a JSON object", hint=_EXAMPLE)
    return value


def _parse_offsets(json_value: OffsetsJson, where: str, *, least: int) -> dict[MessageQueue, int]:
    found = {}
    for topic, brokers in json_value.items():
        for broker, numbers in _table(brokers, where).items():
            for number, offset in _table(numbers, where).items():
                if not (number.isascii() and number.isdigit() and len(number) < 10):
                    raise BadSetting(f"{where}: {number[:20]!r} is not a queue", hint=_EXAMPLE)
                is_number = isinstance(offset, int) and not isinstance(offset, bool)
                if not is_number or not least <= offset <= _OFFSET_MAX:
                    raise BadSetting(
                        f"{where}: the offset of {topic}/{broker}/{number} is {str(offset)[:40]}",
                        hint="-2 is the first message, -1 the end" if least < 0 else None,
                    )
                found[MessageQueue(topic, broker, int(number))] = offset
    return found


def _table(value: object, where: str) -> OffsetsJson:
    if not isinstance(value, dict):
        raise BadSetting(f"{where}: {str(value)[:40]} should be an object", hint=_EXAMPLE)
    return value


def _is_queue(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _QUEUE_MAX


# --- limits --------------------------------------------------------------------------------------


def rows_between(start: QueueOffsets, end: QueueOffsets) -> int:
    """The number of messages from `start` to `end` in the queues that both have."""
    return sum(max(end[queue] - start[queue], 0) for queue in start.keys() & end.keys())


def limit_rows(start: QueueOffsets, end: QueueOffsets, rows_max: int) -> dict[MessageQueue, int]:
    """The end of a batch of at most `rows_max` messages, shared among the queues by their sizes.

    Every queue with messages gets at least one; if `rows_max` is too small for that, queues take
    turns.
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
    """One row for each queue, the rest in proportion; what rounding leaves goes to the largest
    remainders."""
    rows -= len(sizes)
    rest = {queue: size - 1 for queue, size in sizes.items()}
    total = sum(rest.values())
    shares = {queue: 1 + size * rows // total for queue, size in rest.items()}
    left = rows + len(sizes) - sum(shares.values())
    for queue in sorted(rest, key=lambda queue: -(rest[queue] * rows % total))[:left]:
        shares[queue] += 1
    return shares


# --- missing messages ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages of a queue that should be read but are missing; their number may be unknown."""

    queue: MessageQueue
    rows: int | None
    what: str

    def __str__(self) -> str:
        queue = self.queue
        return f"{queue.topic}, queue {queue.queue_id} at {queue.broker_name}: {self.what}"


def shrunk_queues(start: QueueOffsets, end: QueueOffsets) -> list[Loss]:
    """Queues that end before the offset up to which they were read."""
    return [
        Loss(queue, None, f"it was read up to offset {start[queue]} but now ends at {end[queue]}")
        for queue in sorted(start.keys() & end.keys())
        if end[queue] < start[queue]
    ]


def readable_ranges(
    start: QueueOffsets, end: QueueOffsets, begins: QueueOffsets, ends: QueueOffsets
) -> tuple[dict[MessageQueue, tuple[int, int]], list[Loss]]:
    """The range to read of each queue that has messages, and the losses.

    `begins` and `ends` are what brokers have now. A new queue starts at its first message; so does
    one that has shrunk, which `shrunk_queues` has reported before.
    """
    found: dict[MessageQueue, tuple[int, int]] = {}
    losses: list[Loss] = []
    for queue, until in sorted(end.items()):
        begin, last = begins.get(queue, 0), ends.get(queue, until)
        first = start.get(queue, begin)
        if first > until:
            first = begin
        if first < min(begin, until):
            losses.append(_missing(queue, first, min(begin, until), f"the first offset is {begin}"))
            first = min(begin, until)
        if last < until:
            losses.append(_missing(queue, max(first, last), until, f"the queue ends at {last}"))
            until = last
        if first < until:
            found[queue] = (first, until)
    return found, losses


def _missing(queue: MessageQueue, first: int, until: int, what: str) -> Loss:
    return Loss(queue, until - first, f"offsets {first} to {until - 1} are missing, {what}")


def format_queues(queues: Iterable[MessageQueue]) -> str:
    """Queues as text: `orders broker-a 0 1 2; bills broker-b 3`."""
    found: dict[tuple[str, str], list[str]] = {}
    for queue in sorted(queues):
        found.setdefault((queue.topic, queue.broker_name), []).append(str(queue.queue_id))
    return "; ".join(f"{topic} {name} {' '.join(ids)}" for (topic, name), ids in found.items())


def resolve_offsets(
    wanted: QueueOffsets, begins: QueueOffsets, ends: QueueOffsets, option: str
) -> dict[MessageQueue, int]:
    """The offsets of an option with -2 and -1 replaced.

    Raises BadSetting if an offset is out of range, a queue does not exist, or a queue is missing.
    """
    unknown, missing = wanted.keys() - ends.keys(), ends.keys() - wanted.keys()
    if unknown:
        raise BadSetting(
            f"{option}: the queues {format_queues(unknown)} do not exist",
            hint=f"existing queues: {format_queues(ends)}",
        )
    if missing:
        raise BadSetting(
            f"{option} has no offset for {format_queues(missing)}",
            hint="name all queues that are read; -2 is the first message, -1 the end",
        )
    found = {}
    for queue, offset in wanted.items():
        known = {EARLIEST: begins[queue], LATEST: ends[queue]}
        found[queue] = known.get(offset, offset)
        if found[queue] > ends[queue]:
            raise BadSetting(
                f"{option}: the offset {offset} of {format_queues([queue])} is after its end, "
                f"{ends[queue]}",
                hint=f"set {begins[queue]} to {ends[queue]}, -2 or -1",
            )
    return found


def report_losses(losses: Sequence[Loss], *, fail: bool) -> None:
    """Raise DataLost with the losses, or log them; at most SHOWN_MAX queues are listed."""
    shown = "; ".join(str(loss) for loss in losses[:SHOWN_MAX])
    if len(losses) > SHOWN_MAX:
        shown += f"; and {len(losses) - SHOWN_MAX} more queues"
    count = sum(loss.rows or 0 for loss in losses)
    if any(loss.rows is None for loss in losses):
        text = f"messages may be lost, because topics were deleted or brokers lost data: {shown}"
    else:
        text = f"{count} messages are lost: {shown}"
    if fail:
        raise DataLost(text)
    log.warning("%s (failOnDataLoss=false: the query continues)", text)
