"""Frames of replication with epochs (RocketMQ's AutoSwitchHAService). Numbers are big-endian.

| From   | Frame           | Layout                                                               |
|--------|-----------------|----------------------------------------------------------------------|
| slave  | handshake       | 1 i32, from last file i16, learner i16, broker id i64                |
| slave  | acknowledgement | 2 i32, end of the slave's log i64                                    |
| master | handshake       | 1 i32, length i32, end of the master's log i64, last epoch i32 (-1:  |
|        |                 | none), then for each epoch: number i32, begin i64                    |
| master | transfer        | 2 i32, length i32, offset i64, epoch i32, begin of this epoch i64,   |
|        |                 | confirm offset i64, `length` bytes of the log                        |

- The first number is the ordinal of RocketMQ's HAConnectionState; a frame has no other type.
- **Slave handshake.** RocketMQ's master takes exactly 1 as yes in both i16 fields. So a Penstock
  slave that is not a learner sets bit 8 of the learner field to say that it is Penstock, and bit 9
  to say that its acknowledgements mean "flushed to disk". A learner sends 1, without these bits.
  RocketMQ's master reads the frame as soon as 12 of its 16 bytes are there, so the slave must send
  it with one write.
- A RocketMQ slave sends its handshake again if no answer arrives within 5 s.
- **Transfer.** A frame does not span two epochs, but its epoch is not always that of its bytes: in
  the last frame of an epoch RocketMQ's master already names the next one, which begins at the end
  of the frame. An epoch that fits into one frame may never be named, so a slave takes the epochs
  from the handshake, and later ones by their begin.
- A transfer without bytes is a heartbeat. An empty RocketMQ master sends heartbeats with offset -1.
"""

import struct
from typing import Final, NamedTuple

from penstock.errors import ReplicationError
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.frame_limits import EPOCHS_MAX, check_body, check_offset

HANDSHAKE: Final = 1
TRANSFER: Final = 2

SLAVE_HANDSHAKE_BYTES: Final = 16
ACKNOWLEDGEMENT_BYTES: Final = 12
MASTER_HANDSHAKE_BYTES: Final = 20
"""Without the epochs."""
EPOCH_BYTES: Final = 12
TRANSFER_HEADER_BYTES: Final = 36

YES: Final = 1
PENSTOCK: Final = 0x0100
ACKNOWLEDGES_FLUSHED: Final = 0x0200

UNKNOWN_OFFSET: Final = -1
NO_EPOCH: Final = -1

_STATE = struct.Struct(">i")
_SLAVE_HANDSHAKE = struct.Struct(">ihhq")
_ACKNOWLEDGEMENT = struct.Struct(">iq")
_MASTER_HANDSHAKE = struct.Struct(">iiqi")
_EPOCH = struct.Struct(">iq")
_TRANSFER = struct.Struct(">iiqiqq")


class SlaveHandshake(NamedTuple):
    """The first frame of a slave."""

    from_last_file: bool
    """Whether an empty slave wants only the newest segment of the log."""
    learner: bool
    """Whether the slave never becomes a member of the in-sync set."""
    broker_id: int
    penstock: bool = False
    """Whether the slave is Penstock; unknown, so False, for a learner."""
    acknowledges_flushed: bool = False
    """Whether acknowledgements mean "flushed to disk" rather than "received"."""

    @property
    def size(self) -> int:
        return SLAVE_HANDSHAKE_BYTES


class Acknowledgement(NamedTuple):
    """The end of the slave's log. The first one says from where the slave wants the log."""

    offset: int

    @property
    def size(self) -> int:
        return ACKNOWLEDGEMENT_BYTES


class MasterHandshake(NamedTuple):
    """The answer to a slave's handshake."""

    log_end: int
    history: EpochHistory

    @property
    def size(self) -> int:
        return MASTER_HANDSHAKE_BYTES + EPOCH_BYTES * len(self.history)


class TransferHeader(NamedTuple):
    """The header of a frame with bytes of the log, or of a heartbeat. The body follows."""

    offset: int
    """UNKNOWN_OFFSET in heartbeats of an empty RocketMQ master."""
    length: int
    epoch: Epoch
    confirm_offset: int
    """UNKNOWN_OFFSET if the master does not know it yet."""

    @property
    def size(self) -> int:
        """Without the body."""
        return TRANSFER_HEADER_BYTES


# --- from the slave ------------------------------------------------------------------------------


def encode_slave_handshake(handshake: SlaveHandshake) -> bytes:
    """The bytes of a handshake; the flags of Penstock are left out for a learner."""
    if handshake.learner:
        learner = YES
    elif handshake.penstock:
        learner = PENSTOCK | (ACKNOWLEDGES_FLUSHED if handshake.acknowledges_flushed else 0)
    else:
        learner = 0
    return _SLAVE_HANDSHAKE.pack(HANDSHAKE, handshake.from_last_file, learner, handshake.broker_id)


def encode_acknowledgement(offset: int) -> bytes:
    return _ACKNOWLEDGEMENT.pack(TRANSFER, offset)


def read_slave_frame(
    view: memoryview, at: int, end: int
) -> SlaveHandshake | Acknowledgement | None:
    """The frame at `at`; None if it is incomplete in [at, end)."""
    state = _state(view, at, end)
    if state == TRANSFER and end - at >= ACKNOWLEDGEMENT_BYTES:
        offset: int = _ACKNOWLEDGEMENT.unpack_from(view, at)[1]
        check_offset("the end of its log", offset)
        return Acknowledgement(offset)
    if state == HANDSHAKE and end - at >= SLAVE_HANDSHAKE_BYTES:
        _, from_last_file, learner, broker_id = _SLAVE_HANDSHAKE.unpack_from(view, at)
        check_offset("its broker id", broker_id)
        penstock = learner != YES and bool(learner & PENSTOCK)
        return SlaveHandshake(
            from_last_file=from_last_file == YES,
            learner=learner == YES,
            broker_id=broker_id,
            penstock=penstock,
            acknowledges_flushed=penstock and bool(learner & ACKNOWLEDGES_FLUSHED),
        )
    return None


# --- from the master -----------------------------------------------------------------------------


def encode_master_handshake(handshake: MasterHandshake) -> bytes:
    """The bytes of a handshake with the newest EPOCHS_MAX epochs."""
    epochs = handshake.history.epochs[-EPOCHS_MAX:]
    last = epochs[-1].number if epochs else NO_EPOCH
    header = _MASTER_HANDSHAKE.pack(HANDSHAKE, EPOCH_BYTES * len(epochs), handshake.log_end, last)
    return header + b"".join(_EPOCH.pack(number, begin) for number, begin in epochs)


def encode_transfer_header(header: TransferHeader) -> bytes:
    number, begin = header.epoch
    return _TRANSFER.pack(
        TRANSFER, header.length, header.offset, number, begin, header.confirm_offset
    )


def read_master_frame(
    view: memoryview, at: int, end: int
) -> MasterHandshake | TransferHeader | None:
    """The handshake or the header of a transfer at `at`; None if it is incomplete in [at, end)."""
    state = _state(view, at, end)
    if state == HANDSHAKE:
        return _read_master_handshake(view, at, end)
    if state == TRANSFER:
        return _read_transfer_header(view, at, end)
    return None


def _read_master_handshake(view: memoryview, at: int, end: int) -> MasterHandshake | None:
    if end - at < MASTER_HANDSHAKE_BYTES:
        return None
    length, log_end = _MASTER_HANDSHAKE.unpack_from(view, at)[1:3]
    if length > EPOCHS_MAX * EPOCH_BYTES:
        count = length // EPOCH_BYTES
        raise ReplicationError.over("handshake", figure=count, limit=EPOCHS_MAX, unit="epochs")
    if length < 0 or length % EPOCH_BYTES:
        raise ReplicationError(f"the peer sent {length} as the length of its epochs")
    check_offset("the end of its log", log_end)
    begin = at + MASTER_HANDSHAKE_BYTES
    if end < begin + length:
        return None
    epochs = map(Epoch._make, _EPOCH.iter_unpack(view[begin : begin + length]))
    return MasterHandshake(log_end, EpochHistory(epochs))


def _read_transfer_header(view: memoryview, at: int, end: int) -> TransferHeader | None:
    if end - at < TRANSFER_HEADER_BYTES:
        return None
    _, length, offset, number, begin, confirm_offset = _TRANSFER.unpack_from(view, at)
    if offset != UNKNOWN_OFFSET or length != 0:
        check_body(offset, length)
    check_offset("the number of its epoch", number)
    check_offset("the begin of its epoch", begin)
    if confirm_offset != UNKNOWN_OFFSET:
        check_offset("its confirm offset", confirm_offset)
    return TransferHeader(offset, length, Epoch(number, begin), confirm_offset)


def _state(view: memoryview, at: int, end: int) -> int | None:
    """The connection state that the frame at `at` names; None if it is incomplete."""
    if end - at < _STATE.size:
        return None
    state: int = _STATE.unpack_from(view, at)[0]
    if state not in (HANDSHAKE, TRANSFER):
        raise ReplicationError(f"the peer sent a frame of the unknown type {state}")
    return state
