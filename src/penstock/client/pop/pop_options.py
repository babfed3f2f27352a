"""Options of POP consumers."""

from dataclasses import dataclass
from typing import Literal

from penstock.client.client_options import ClientOptions, check_at_least, check_group
from penstock.errors import BadSetting, InvalidParameter

INVISIBLE_MS_MAX = 3 * 24 * 3600 * 1000
"""Longest invisible time that brokers accept."""


@dataclass(frozen=True, kw_only=True)
class PopConsumerOptions(ClientOptions):
    """Options of `AsyncPopConsumer` and `PopConsumer`.

    With `fifo` the messages of a queue are received in order, and no more of it until they are
    acknowledged. `start_at` is where a new group begins. `wait_ms` and `invisible_ms` are defaults
    of `receive`. The others are for handlers: `concurrency` of them run at the same time, up to
    `messages_max` messages per topic and broker are held, `close` waits `drain_ms` for handlers.
    """

    group: str
    fifo: bool = False
    start_at: Literal["last", "first"] = "last"
    wait_ms: int = 15_000
    invisible_ms: int = 60_000
    concurrency: int = 20
    messages_max: int = 96
    retries_max: int = 16
    consume_timeout_ms: int = 900_000
    drain_ms: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group(self.group)
        if self.start_at not in ("last", "first"):
            raise BadSetting(f"start_at is {self.start_at!r}", hint='give "last" or "first"')
        check_invisible_ms(self.invisible_ms)
        for name in ("concurrency", "messages_max", "consume_timeout_ms"):
            check_at_least(self, name, 1)


def check_invisible_ms(ms: int) -> int:
    """Raise InvalidParameter if brokers do not accept this invisible time."""
    if not 0 < ms <= INVISIBLE_MS_MAX:
        raise InvalidParameter(
            f"invisible_ms is {ms}", hint=f"give 1 to {INVISIBLE_MS_MAX} milliseconds"
        )
    return ms
