"""The demo's messages, computed from their number by the producers and by the check.

Message `n` goes to queue `n % QUEUES_TOTAL`, counted over all topics, and has the queue offset
`n // QUEUES_TOTAL`. So the acknowledged messages can be verified after a crash.
"""

import msgspec

from penstock.config import StoreConfig

TOPICS = (b"Registered", b"Ordered")
QUEUES = 4
QUEUES_TOTAL = len(TOPICS) * QUEUES
TAGS = (b"trial", b"paid", b"vip")

_FILLER = bytes(range(32, 127)) * 4


def config(*, sync_flush: bool) -> StoreConfig:
    """Small segments, so that there are several, and no retention, however full the disk is."""
    return StoreConfig(
        segment_bytes=64 * 1024 * 1024,
        index_slots=1_000_000,
        index_entries=4_000_000,
        sync_flush=sync_flush,
        disk_clean_percent=100,
        disk_force_percent=100,
        disk_refuse_percent=100,
    )


def toml(*, sync_flush: bool) -> str:
    """The same settings as a file for the broker."""
    values = msgspec.structs.asdict(config(sync_flush=sync_flush))
    defaults = msgspec.structs.asdict(StoreConfig())
    lines = [
        f"{name} = {str(value).lower()}"
        for name, value in values.items()
        if value != defaults[name]
    ]
    quiet = "[broker]\nvip_port = 0\nprobe_port = 0\n"
    return quiet + "[store]\n" + "\n".join(lines) + "\n"


def queue_of(number: int) -> tuple[bytes, int]:
    """The topic and queue id of a message."""
    index = number % QUEUES_TOTAL
    return TOPICS[index % len(TOPICS)], index // len(TOPICS)


def body(number: int) -> bytes:
    """100 to 199 bytes that start with the number of the message."""
    start = number % 89
    return b"%010d " % number + _FILLER[start : start + 89 + number * 37 % 100]


def key(number: int) -> str:
    return f"order-{number}"


def properties(number: int) -> bytes:
    """A tag, a key and a unique id."""
    return b"TAGS\x01%b\x02KEYS\x01order-%d\x02UNIQ_KEY\x01%032X\x02" % (
        TAGS[number % len(TAGS)],
        number,
        number,
    )
