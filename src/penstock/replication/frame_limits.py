"""Limits that both protocols of the HA port share. A number from a peer is checked once, here."""

from typing import Final

from penstock.errors import ReplicationError

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
"""The longest body that a slave accepts. An Apache master sends up to `haTransferBatchSize`
(32 KiB); more than `APACHE_FRAME_BYTES_MAX` would stop its own slaves."""
APACHE_FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
"""The read buffer of an Apache slave, which must hold a whole frame with its header."""
EPOCHS_MAX: Final = 10_000
"""The largest number of epochs in a handshake. An Apache master sends up to 1,000."""

I32_MAX: Final = 2**31 - 1
I64_MAX: Final = 2**63 - 1


def check_body(offset: int, length: int) -> None:
    """Refuse a range of the log that no master can send."""
    if length < 0:
        raise ReplicationError(f"the peer sent {length} as the length of a body")
    if length > BODY_BYTES_MAX:
        raise ReplicationError.over("body of a frame", figure=length, limit=BODY_BYTES_MAX)
    if not 0 <= offset <= I64_MAX - length:
        raise ReplicationError(f"the peer sent a frame of {length} bytes for log offset {offset}")


def check_offset(what: str, offset: int) -> None:
    """Refuse a log offset that is negative."""
    if offset < 0:
        raise ReplicationError(f"the peer sent {offset} as {what}")
