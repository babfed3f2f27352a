"""Frames of AutoSwitchHAService: golden bytes, truncation, limits, garbage."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ReplicationError
from penstock.replication.epoch_frames import (
    Acknowledgement,
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_acknowledgement,
    encode_master_handshake,
    encode_slave_handshake,
    encode_transfer_header,
    read_master_frame,
    read_slave_frame,
)
from penstock.replication.epochs import Epoch, EpochHistory
from penstock.replication.frame_limits import BODY_BYTES_MAX, EPOCHS_MAX
from tests.unit.replication.strategies import EPOCHS, I64_MAX, OFFSETS, histories

SlaveFrame = SlaveHandshake | Acknowledgement
MasterFrame = MasterHandshake | TransferHeader


def encode_slave_frame(frame: SlaveFrame) -> bytes:
    if isinstance(frame, Acknowledgement):
        return encode_acknowledgement(frame.offset)
    return encode_slave_handshake(frame)


def encode_master_frame(frame: MasterFrame) -> bytes:
    if isinstance(frame, MasterHandshake):
        return encode_master_handshake(frame)
    return encode_transfer_header(frame)


@st.composite
def slave_handshakes(draw: st.DrawFn) -> SlaveHandshake:
    learner, penstock, flushed = draw(st.sampled_from([(1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)]))
    return SlaveHandshake(
        draw(st.booleans()), bool(learner), draw(OFFSETS), bool(penstock), bool(flushed)
    )


HEARTBEATS = st.builds(TransferHeader, st.just(-1), st.just(0), EPOCHS, st.just(-1))
TRANSFERS = st.builds(
    TransferHeader,
    st.integers(0, I64_MAX - BODY_BYTES_MAX),
    st.integers(0, BODY_BYTES_MAX),
    EPOCHS,
    OFFSETS,
)
SLAVE_FRAMES = slave_handshakes() | st.builds(Acknowledgement, OFFSETS)
MASTER_FRAMES = st.builds(MasterHandshake, OFFSETS, histories()) | TRANSFERS | HEARTBEATS


# --- golden bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (SlaveHandshake(False, False, 2), "00000001 0000 0000 0000000000000002"),
        (SlaveHandshake(True, False, 2), "00000001 0001 0000 0000000000000002"),
        (SlaveHandshake(False, True, 3), "00000001 0000 0001 0000000000000003"),
        (SlaveHandshake(False, False, 2, True), "00000001 0000 0100 0000000000000002"),
        (SlaveHandshake(True, False, 2, True, True), "00000001 0001 0300 0000000000000002"),
        (Acknowledgement(0x40000010), "00000002 0000000040000010"),
    ],
)
def test_golden_bytes_of_a_slave(frame: SlaveFrame, data: str) -> None:
    encoded = bytes.fromhex(data)
    assert encode_slave_frame(frame) == encoded
    assert read_slave_frame(memoryview(encoded), 0, len(encoded)) == frame
    assert frame.size == len(encoded)


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (MasterHandshake(0, EpochHistory()), "00000001 00000000 0000000000000000 ffffffff"),
        (
            MasterHandshake(500, EpochHistory([Epoch(1, 0), Epoch(7, 256)])),
            "00000001 00000018 00000000000001f4 00000007"
            "00000001 0000000000000000 00000007 0000000000000100",
        ),
        (
            TransferHeader(0x100, 0x8000, Epoch(7, 0xFF), 0xF0),
            "00000002 00008000 0000000000000100 00000007 00000000000000ff 00000000000000f0",
        ),
        (
            TransferHeader(-1, 0, Epoch(1, 0), -1),
            "00000002 00000000 ffffffffffffffff 00000001 0000000000000000 ffffffffffffffff",
        ),
    ],
)
def test_golden_bytes_of_a_master(frame: MasterFrame, data: str) -> None:
    encoded = bytes.fromhex(data)
    assert encode_master_frame(frame) == encoded
    assert read_master_frame(memoryview(encoded), 0, len(encoded)) == frame
    assert frame.size == len(encoded)


def test_the_flags_of_penstock_are_no_yes_for_rocketmq() -> None:
    """RocketMQ's master compares both flags with 1."""
    for flushed in (False, True):
        data = encode_slave_handshake(SlaveHandshake(False, False, 1, True, flushed))
        assert struct.unpack(">ihhq", data)[2] != 1
    learner = encode_slave_handshake(SlaveHandshake(False, True, 1, True, True))
    assert struct.unpack(">ihhq", learner)[2] == 1


def test_flags_of_a_later_version_are_ignored() -> None:
    data = struct.pack(">ihhq", 1, 2, 0x7402, 5)
    assert read_slave_frame(memoryview(data), 0, 16) == SlaveHandshake(False, False, 5)


def test_the_last_frame_of_an_epoch_may_name_the_next_one() -> None:
    header = TransferHeader(offset=100, length=50, epoch=Epoch(2, 150), confirm_offset=90)
    assert read_master_frame(memoryview(encode_transfer_header(header)), 0, 36) == header


# --- truncation, limits, garbage -----------------------------------------------------------------


@given(SLAVE_FRAMES, st.binary(max_size=5))
def test_a_slaves_frame_is_read_once_it_is_complete(frame: SlaveFrame, before: bytes) -> None:
    data = before + encode_slave_frame(frame) + b"next"
    at = len(before)
    for end in range(at, len(data) + 1):
        complete = end - at >= frame.size
        assert read_slave_frame(memoryview(data), at, end) == (frame if complete else None)


@given(MASTER_FRAMES, st.binary(max_size=5))
def test_a_masters_frame_is_read_once_it_is_complete(frame: MasterFrame, before: bytes) -> None:
    data = before + encode_master_frame(frame) + b"next"
    at = len(before)
    for end in range(at, len(data) + 1):
        complete = end - at >= frame.size
        assert read_master_frame(memoryview(data), at, end) == (frame if complete else None)


def test_a_handshake_carries_the_newest_epochs() -> None:
    history = EpochHistory(Epoch(n, 10 * n) for n in range(EPOCHS_MAX + 5))
    data = encode_master_handshake(MasterHandshake(10**6, history))
    found = read_master_frame(memoryview(data), 0, len(data))
    assert found == MasterHandshake(10**6, EpochHistory(history.epochs[5:]))


@pytest.mark.parametrize("state", [-1, 0, 3, 4, 5, 0x50454E53])
def test_an_unknown_type_is_refused_at_once(state: int) -> None:
    data = memoryview(struct.pack(">i", state))
    for read in (read_slave_frame, read_master_frame):
        assert read(data, 0, 3) is None
        with pytest.raises(ReplicationError):
            read(data, 0, 4)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">ihhq", 1, 0, 0, -1), id="broker id"),
        pytest.param(struct.pack(">iq", 2, -1), id="acknowledgement"),
    ],
)
def test_an_impossible_frame_of_a_slave_is_refused(data: bytes) -> None:
    with pytest.raises(ReplicationError):
        read_slave_frame(memoryview(data), 0, len(data))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">iiqi", 1, -12, 0, 0), id="negative length"),
        pytest.param(struct.pack(">iiqi", 1, 13, 0, 0), id="part of an epoch"),
        pytest.param(struct.pack(">iiqi", 1, 12 * (EPOCHS_MAX + 1), 0, 0), id="too many epochs"),
        pytest.param(struct.pack(">iiqi", 1, 0, -1, 0), id="negative end"),
        pytest.param(struct.pack(">iiqiiqiq", 1, 24, 9, 1, 2, 0, 1, 5), id="epochs not in order"),
        pytest.param(struct.pack(">iiqiiq", 1, 12, 9, 1, 1, -5), id="epoch before the log"),
        pytest.param(struct.pack(">iiqiqq", 2, -1, 0, 1, 0, 0), id="negative body"),
        pytest.param(struct.pack(">iiqiqq", 2, BODY_BYTES_MAX + 1, 0, 1, 0, 0), id="long body"),
        pytest.param(struct.pack(">iiqiqq", 2, 1, -1, 1, 0, 0), id="body without offset"),
        pytest.param(struct.pack(">iiqiqq", 2, 0, -2, 1, 0, 0), id="negative offset"),
        pytest.param(struct.pack(">iiqiqq", 2, 1, I64_MAX, 1, 0, 0), id="end beyond 63 bits"),
        pytest.param(struct.pack(">iiqiqq", 2, 0, 0, -1, 0, 0), id="negative epoch"),
        pytest.param(struct.pack(">iiqiqq", 2, 0, 0, 1, -1, 0), id="negative begin"),
        pytest.param(struct.pack(">iiqiqq", 2, 0, 0, 1, 0, -2), id="negative confirm offset"),
    ],
)
def test_an_impossible_frame_of_a_master_is_refused(data: bytes) -> None:
    with pytest.raises(ReplicationError):
        read_master_frame(memoryview(data), 0, len(data))


@given(st.integers(0, 3), st.binary(max_size=80))
def test_any_bytes_are_decoded_or_refused(state: int, data: bytes) -> None:
    for garbage in (data, struct.pack(">i", state) + data):
        for read in (read_slave_frame, read_master_frame):
            try:
                frame = read(memoryview(garbage), 0, len(garbage))
            except ReplicationError:
                continue
            assert frame is None or frame.size <= len(garbage)
