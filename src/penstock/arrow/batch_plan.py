"""The offset ranges of a batch, from the options and what brokers have. No I/O."""

from collections.abc import Mapping

from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.queue_offsets import (
    OffsetSpec,
    QueueOffsets,
    readable_ranges,
    report_losses,
    resolve_offsets,
)
from penstock.arrow.source_options import SourceOptions
from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue


def boundary_offsets(
    wanted: OffsetSpec,
    option: str,
    begins: QueueOffsets,
    ends: QueueOffsets,
    at_timestamp: QueueOffsets,
) -> dict[MessageQueue, int]:
    """The starting or ending offset of each queue, as the option wants it.

    `at_timestamp` is what brokers answer for the timestamp, if the option is one.
    """
    if wanted == "earliest":
        return dict(begins)
    if wanted == "latest":
        return dict(ends)
    if isinstance(wanted, int):
        # Messages may have arrived since the ends were queried.
        return {q: min(max(at_timestamp[q], begins[q]), ends[q]) for q in ends}
    assert not isinstance(wanted, str)
    return resolve_offsets(wanted, begins, ends, option)


def checked_start(options: SourceOptions, start: QueueOffsets, end: QueueOffsets) -> QueueOffsets:
    """The starting offsets, none after the end.

    A timestamp or `latest` after the end is an empty range; an offset after the end is an error.
    """
    if isinstance(options.starting, Mapping) and isinstance(options.ending, Mapping):
        for queue in sorted(start):
            if start[queue] > end[queue]:
                raise BadSetting(
                    f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name}: "
                    f"startingOffsets has {start[queue]}, endingOffsets {end[queue]}",
                    hint="start before the end",
                )
    return {queue: min(offset, end[queue]) for queue, offset in start.items()}


def existing_ranges(
    options: SourceOptions,
    start: QueueOffsets,
    end: QueueOffsets,
    begins: QueueOffsets,
    ends: QueueOffsets,
) -> list[QueueRange]:
    """The ranges to read; raises DataLost if messages are missing and `failOnDataLoss` is set."""
    found, losses = readable_ranges(start, end, begins, ends)
    if losses:
        report_losses(losses, fail=options.fail_on_data_loss)
    return [
        QueueRange(queue.topic, queue.broker_name, queue.queue_id, first, until)
        for queue, (first, until) in found.items()
    ]
