"""Options of producers."""

from dataclasses import dataclass
from typing import Final

from penstock.client.client_options import ClientOptions, check_at_least, check_group
from penstock.client.producer.accumulator import Batching
from penstock.errors import BadSetting
from penstock.wire.compression import Compression
from penstock.wire.frame import FRAME_BYTES_MAX

GROUP_DEFAULT: Final = "penstock"
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Default of the longest body, as in RocketMQ's clients and brokers."""
SEND_HEADER_BYTES_MAX: Final = 64 * 1024
"""The header of a send is shorter than this: its properties have at most 32,767 bytes."""
BODY_BYTES_LIMIT: Final = FRAME_BYTES_MAX - SEND_HEADER_BYTES_MAX
"""A request has to fit into one frame."""


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    """How messages are sent.

    `retries` are further attempts, on another broker if there is one; all attempts share
    `timeout_ms`. `retry_not_stored` also retries if a broker has stored the message but a flush or
    a replica timed out (FLUSH_DISK_TIMEOUT and similar). `avoid_faulty` avoids brokers that failed
    or were slow, after failures for `avoid_ms` or, if that is None, by RocketMQ's table. Bodies of
    at least `compress_above_bytes` are compressed. At most `in_flight_max` messages wait for their
    acknowledgement. Brokers may create topics that do not exist, unless `create_topics` is False:
    then such a send raises NoRoute.
    """

    retries: int = 2
    retry_not_stored: bool = False
    compression: str | None = "zlib"
    compress_above_bytes: int = 4096
    message_bytes_max: int = MESSAGE_BYTES_MAX
    avoid_faulty: bool = True
    avoid_ms: int | None = None
    in_flight_max: int = 10_000
    create_topics: bool = True

    def __post_init__(self) -> None:
        kinds = [kind.name.lower() for kind in Compression]
        if self.compression is not None and self.compression not in kinds:
            raise BadSetting(
                f"compression is {self.compression!r}",
                hint=f"give one of {', '.join(kinds)}, or None",
            )
        if not 0 < self.message_bytes_max <= BODY_BYTES_LIMIT:
            raise BadSetting(
                f"message_bytes_max is {self.message_bytes_max}",
                hint=f"give 1 to {BODY_BYTES_LIMIT}: a request has to fit into one frame",
            )
        check_at_least(self, "retries", 0)
        check_at_least(self, "in_flight_max", 1)
        check_at_least(self, "compress_above_bytes", 0)
        if self.avoid_ms is not None:
            check_at_least(self, "avoid_ms", 0)


@dataclass(frozen=True, kw_only=True)
class ProducerOptions(SendOptions, ClientOptions):
    """Options of `AsyncProducer` and `Producer`.

    `batching` sends messages that are submitted within a few milliseconds in one request.
    """

    group: str = GROUP_DEFAULT
    batching: Batching | bool = False

    def __post_init__(self) -> None:
        ClientOptions.__post_init__(self)
        SendOptions.__post_init__(self)
        check_group(self.group)
