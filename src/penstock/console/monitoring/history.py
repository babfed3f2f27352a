"""The last samples of the cluster's figures, for charts."""

from collections import deque
from dataclasses import asdict, dataclass

SAMPLES_MAX = 720
"""One hour, at one sample in five seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of a cluster at one time. An unknown value is None."""

    at_ms: int
    rate_in: float | None
    rate_out: float | None
    lag: int | None
    lag_ms: int | None
    disk_used: float | None


class History:
    """A ring of samples."""

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples_max)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def since(self, since_ms: int) -> list[dict[str, object]]:
        """The samples after a time, oldest first."""
        return [asdict(sample) for sample in self._samples if sample.at_ms > since_ms]
