"""How soon arrivals wake suspended pulls.

Usually in the next loop iteration. Where many messages per millisecond go to consumers that wait
for each of them, arrivals of a millisecond go out together: a consumer then gets several messages
with one response, instead of one response, one wake-up and one new pull for each. On a machine
whose cores are all busy this costs less time than it takes.
"""

PERIOD_MS = 16
"""The rate is that of the last period of this length."""
GATHER_MS = 1
"""How long arrivals are gathered. Timers of uvloop have no finer resolution."""
GATHER_FROM, GATHER_UNTIL = 4, 2
"""Messages per millisecond from which on arrivals are gathered, and below which no more."""


class WakePace:
    """Decides about the next wake-up, by the messages that woken pulls have got."""

    def __init__(self) -> None:
        self._began_ms = 0
        self._messages = 0
        """At the begin of the period."""
        self._gathers = False

    def delay_ms(self, messages: int, now_ms: int) -> int:
        """The time until the next wake-up; `messages`: how many all woken pulls have got."""
        passed_ms = now_ms - self._began_ms
        if passed_ms >= PERIOD_MS:
            least = GATHER_UNTIL if self._gathers else GATHER_FROM
            self._gathers = messages - self._messages >= least * passed_ms
            self._began_ms, self._messages = now_ms, messages
        return GATHER_MS if self._gathers else 0
