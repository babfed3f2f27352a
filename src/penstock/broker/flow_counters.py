"""Counters of messages in one direction, and those of all deliveries.

A counter stores samples of itself for each window; `stats` describes windows and samples.
"""

from array import array

SECOND_MS = 1_000
WINDOWS = ((10 * SECOND_MS, 7), (600 * SECOND_MS, 7), (3_600 * SECOND_MS, 25))
"""(interval, samples) of minute, hour and day."""

NUMBER, NUMS, SIZE, TIMES = 0, 1, 2, 3  # fields of a sample
_FIELDS = 4


class FlowCounter:
    """Messages, bytes and requests in one direction, with the samples of each window."""

    def __init__(self) -> None:
        # Since the start.
        self.nums: int = 0
        self.size: int = 0
        self.times: int = 0
        # Of a group: the age of the last message that it pulled.
        self.behind_ms: int = 0
        # Whether the topic is one of the system's.
        self.internal: bool = False
        # Whether the counter is no longer in its table; never unset.
        self.dropped: bool = False
        # For each window, rows of a number and the values then.
        self.samples: tuple[array[int], ...] = tuple([array("q") for _ in WINDOWS])

    def has_changed(self, window: int) -> bool:
        """Whether the counter has changed since the last sample, by its number of requests."""
        row = self.samples[window]
        return self.times != (row[len(row) - 1] if row else 0)

    def sample(self, window: int, number: int) -> None:
        """Store the present values under this number."""
        row = self.samples[window]
        if not row:
            row.extend((number - 1, 0, 0, 0))  # zero at the sample before the first change
        row.extend((number, self.nums, self.size, self.times))
        oldest = number - WINDOWS[window][1]  # still needed until this round is complete
        while row[_FIELDS] <= oldest:  # the sample before is outside of the window
            del row[:_FIELDS]

    def position_of(self, window: int, number: int) -> int:
        """Position of the stored sample with this number, or of the last one before it."""
        row = self.samples[window]
        position = len(row) - _FIELDS
        while row[position] > number:
            position -= _FIELDS
        return position


class Deliveries:
    """What is delivered to all groups together."""

    def __init__(self) -> None:
        # Pulls that found messages, since the start.
        self.pulls: int = 0
        # Messages of all topics, and without those of system topics.
        self.all: FlowCounter = FlowCounter()
        self.user: FlowCounter = FlowCounter()

    def count(self, flow: FlowCounter, count: int, size: int, behind_ms: int) -> None:
        """Count a pull of a group; `behind_ms` is the age of the first message."""
        flow.nums += count
        flow.size += size
        flow.times += 1
        flow.behind_ms = behind_ms
        self.pulls += 1
        self.all.nums += count
        if not flow.internal:
            self.user.nums += count
