"""Redirects messages with a delay level or a delivery time to the queues of the delay services."""

from typing import NamedTuple

from penstock.broker.delay.delay_levels import TIMER_PROPERTIES, Delay, delay_level
from penstock.broker.delay.timers import Timers
from penstock.store.consumequeue.consumequeue import ConsumeQueue


class Redirect(NamedTuple):
    """The queue that a message is stored in instead of the one it was sent to."""

    queue: ConsumeQueue
    sys_flag: int
    recall_handle: bytes = b""  # by which the producer can recall the message


class DelayRedirect:
    """Redirects messages whose delivery time is in the future."""

    def __init__(self, delay: Delay, timers: Timers) -> None:
        self._delay = delay
        self._timers = timers

    def find_redirect(
        self, topic: str, queue_id: int, properties: dict[str, str], sys_flag: int, now_ms: int
    ) -> Redirect | None:
        """The redirect of a message, or None if it is to be delivered now.

        The real topic and queue are added to the properties.
        """
        level = delay_level(properties)
        if level > 0:
            return Redirect(self._delay.redirect(topic, queue_id, properties, level), sys_flag)
        if any(name in properties for name in TIMER_PROPERTIES):
            queue = self._timers.redirect(topic, queue_id, properties, now_ms)
            if queue is not None:
                return Redirect(queue, sys_flag, self._timers.recall_handle(topic, properties))
        return None
