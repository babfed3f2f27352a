"""Epochs: order, cuts, lookup, the end of two equal logs, the format of the file."""

import zlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ReplicationError, StoreError
from penstock.replication.epochs import Epoch, EpochHistory, decode_epochs
from tests.depth import rounds
from tests.unit.replication.strategies import histories


def history(*epochs: tuple[int, int]) -> EpochHistory:
    return EpochHistory(Epoch(*epoch) for epoch in epochs)


# --- order ---------------------------------------------------------------------------------------


def test_a_new_history_is_empty() -> None:
    epochs = EpochHistory()
    assert (epochs.last, epochs.epochs, len(epochs)) == (None, (), 0)
    assert epochs.at(0) is None


def test_epochs_are_appended_in_order() -> None:
    epochs = EpochHistory()
    epochs.append(1, 0)
    epochs.append(4, 100)
    assert epochs == history((1, 0), (4, 100))
    assert epochs.last == Epoch(4, 100)
    assert epochs != history((1, 0))


@pytest.mark.parametrize("epoch", [(4, 200), (3, 200), (5, 99), (2**31, 200), (5, 2**63)])
def test_an_epoch_that_does_not_follow_the_last_one_is_refused(epoch: tuple[int, int]) -> None:
    epochs = history((1, 0), (4, 100))
    with pytest.raises(ReplicationError):
        epochs.append(*epoch)
    assert epochs == history((1, 0), (4, 100))
    with pytest.raises(ReplicationError):
        history((1, 0), (4, 100), epoch)


@pytest.mark.parametrize("epoch", [(-1, 0), (1, -1)])
def test_a_negative_epoch_is_refused(epoch: tuple[int, int]) -> None:
    with pytest.raises(ReplicationError):
        history(epoch)


def test_a_new_epoch_replaces_an_empty_one() -> None:
    epochs = history((1, 0), (2, 100))
    epochs.append(3, 100)
    assert epochs == history((1, 0), (3, 100))


def test_the_only_epoch_is_kept_when_it_is_empty() -> None:
    """A replica that has only this epoch must find it."""
    epochs = history((1, 0))
    epochs.append(2, 0)
    epochs.append(3, 0)
    assert epochs == history((1, 0), (3, 0))
    assert epochs.at(0) == Epoch(3, 0)
    assert history((1, 0)).common_end(500, epochs, 900) == 0


# --- cuts and lookup -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "dropped"), [(0, 0), (99, 0), (100, 0), (101, 1), (200, 1), (201, 2), (999, 2)]
)
def test_epochs_before_the_begin_of_the_log_are_dropped(begin: int, dropped: int) -> None:
    epochs = history((1, 0), (2, 100), (3, 200))
    epochs.cut_before(begin)
    assert epochs == history(*((1, 0), (2, 100), (3, 200))[dropped:])


@pytest.mark.parametrize(("end", "left"), [(0, 1), (99, 1), (100, 2), (199, 2), (200, 3), (999, 3)])
def test_epochs_after_the_end_of_the_log_are_dropped(end: int, left: int) -> None:
    """One that begins at the end is that of a master that has written nothing yet."""
    epochs = history((1, 0), (2, 100), (3, 200))
    epochs.cut_after(end)
    assert epochs == history(*((1, 0), (2, 100), (3, 200))[:left])


def test_a_replica_that_ends_where_the_log_begins_still_shares_an_epoch() -> None:
    master, slave = history((1, 0), (2, 100)), history((1, 0))
    master.cut_before(100)
    assert slave.common_end(100, master, 150) == 100


@pytest.mark.parametrize(
    ("offset", "number"), [(9, None), (10, 1), (99, 1), (100, 3), (299, 3), (300, 4), (900, 4)]
)
def test_the_epoch_of_an_offset(offset: int, number: int | None) -> None:
    epochs = history((1, 10), (2, 100), (3, 100), (4, 300))
    found = epochs.at(offset)
    assert (found and found.number) == number
    index = epochs.index_at(offset)
    assert (None if index is None else epochs.epochs[index]) == found


def test_an_epoch_ends_where_the_next_begins_or_with_the_log() -> None:
    epochs = history((1, 0), (2, 100))
    assert [epochs.end_of(index, 150) for index in (0, 1)] == [100, 150]
    assert [epochs.end_of(index, 70) for index in (0, 1)] == [70, 70]  # the log lost its end


# --- the common end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "mine_end", "theirs", "theirs_end", "common"),
    [
        pytest.param([(1, 0)], 50, [(1, 0)], 80, 50, id="behind"),
        pytest.param([(1, 0)], 80, [(1, 0)], 50, 50, id="ahead"),
        pytest.param([(1, 0)], 80, [(1, 0), (2, 60)], 90, 60, id="more of an old epoch"),
        pytest.param([(1, 0), (2, 60)], 90, [(1, 0), (3, 40)], 95, 40, id="two successors"),
        pytest.param([(1, 0), (2, 60)], 90, [(1, 0), (3, 60)], 95, 60, id="two at one offset"),
        pytest.param([(1, 0), (2, 60)], 90, [(2, 60), (3, 90)], 99, 90, id="prefix deleted"),
        pytest.param([(1, 0)], 60, [(2, 0)], 60, None, id="nothing in common"),
        pytest.param([(1, 0)], 60, [(1, 10)], 60, None, id="same number, other begin"),
        pytest.param([], 0, [(1, 0)], 60, None, id="new replica"),
        pytest.param([(1, 0)], 60, [], 0, None, id="empty peer"),
    ],
)
def test_the_common_end(
    mine: list[tuple[int, int]],
    mine_end: int,
    theirs: list[tuple[int, int]],
    theirs_end: int,
    common: int | None,
) -> None:
    a, b = history(*mine), history(*theirs)
    assert a.common_end(mine_end, b, theirs_end) == common
    assert b.common_end(theirs_end, a, mine_end) == common


@dataclass
class Replica:
    """A log of (epoch, serial number) pairs instead of bytes, and its epochs."""

    log: list[tuple[int, int]] = field(default_factory=list)
    epochs: EpochHistory = field(default_factory=EpochHistory)

    def common(self, master: "Replica") -> int | None:
        return self.epochs.common_end(len(self.log), master.epochs, len(master.log))

    def follow(self, master: "Replica", count: int) -> None:
        """What a slave does: handshake, truncation, then some transfers."""
        common = self.common(master)
        if common is None:
            assert equal_up_to(self, master) == 0
            common = 0
        del self.log[common:]
        self.epochs = EpochHistory(master.epochs.epochs)
        self.log += master.log[common : common + count]


def equal_up_to(a: Replica, b: Replica) -> int:
    pairs = zip(a.log, b.log, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.log), len(b.log)))


REPLICAS = 3
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("elect", "write", "follow", "lose")),
        st.integers(0, REPLICAS - 1),
        st.integers(0, REPLICAS - 1),
        st.integers(0, 4),
    ),
    min_size=20,  # a divergence takes several steps
    max_size=40,
)


@settings(max_examples=rounds(ci=300, proof=5000))
@given(STEPS)
def test_the_common_end_is_where_logs_differ(steps: list[tuple[str, int, int, int]]) -> None:
    """Any replica is elected at any time; old masters go on writing; replicas lose their tail."""
    replicas = [Replica() for _ in range(REPLICAS)]
    terms: dict[int, int] = {}  # by master: the epoch in which it writes
    epoch = serial = 0
    for step, who, other, count in steps:
        replica = replicas[who]
        if step == "elect":
            epoch += 1
            terms[who] = epoch
            replica.epochs.cut_after(len(replica.log))
            replica.epochs.append(epoch, len(replica.log))
        elif step == "write" and who in terms:
            for _ in range(count):
                serial += 1
                replica.log.append((terms[who], serial))
        elif step == "follow" and other in terms and terms[other] > terms.get(who, 0):
            terms.pop(who, None)
            replica.follow(replicas[other], count)
        elif step == "lose" and who not in terms:
            del replica.log[max(len(replica.log) - count, 0) :]
        for a in replicas:
            for b in replicas:
                common = a.common(b)
                assert (common or 0) == equal_up_to(a, b)


# --- the file ------------------------------------------------------------------------------------

# Written by RocketMQ's EpochFileCache.
GOLDEN_FILES = [
    (b"1\n1725254278\n1-0\n", [(1, 0)]),
    (b"2\n355729437\n1-0\n2-100\n", [(1, 0), (2, 100)]),
]


@pytest.mark.parametrize(("data", "epochs"), GOLDEN_FILES)
def test_the_file_is_that_of_rocketmq(data: bytes, epochs: list[tuple[int, int]]) -> None:
    assert decode_epochs(data) == history(*epochs)
    assert history(*epochs).encode() == data


def test_the_crc_has_31_bits() -> None:
    lines = next(
        line for n in range(100) if zlib.crc32(line := b"%d-0\n" % n) > 0x7FFF_FFFF
    )  # bit 31 is set
    data = b"1\n%d\n%b" % (zlib.crc32(lines) - 2**31, lines)
    assert decode_epochs(data).encode() == data


def test_an_empty_history_is_a_file_too() -> None:
    assert EpochHistory().encode() == b"0\n0\n"
    assert decode_epochs(b"0\n0\n") == EpochHistory()


@given(histories())
def test_a_history_survives_its_file(epochs: EpochHistory) -> None:
    assert decode_epochs(epochs.encode()) == epochs


def test_a_crc_of_0_is_not_checked() -> None:
    assert decode_epochs(b"2\n0\n1-0\n2-100\n") == history((1, 0), (2, 100))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1",
        b"1\n1725254278\n",
        b"1\n1725254278\n1-0\n2-100\n",
        b"2\n1725254278\n1-0\n",
        b"1\n1725254279\n1-0\n",
        b"x\n0\n1-0\n",
        b"-1\n0\n",
        b"1\n0\n1\n",
        b"1\n0\n1-0-0\n",
        b"1\n0\n-1-0\n",
        b"1\n0\n 1-0\n",
        b"1\n0\n\n",
        b"2\n0\n2-0\n1-100\n",
        b"2\n0\n1-100\n2-0\n",
        b"1\n0\n2147483648-0\n",
        b"1\n0\n1-9223372036854775808\n",
        b"1\n0\n\xff-0\n",
        b"\0" * 17,
    ],
)
def test_a_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        decode_epochs(data)


@given(histories(), st.data())
def test_a_truncated_or_changed_file_is_never_misread(
    epochs: EpochHistory, data: st.DataObject
) -> None:
    encoded = bytearray(epochs.encode())
    cut = bytes(encoded[: data.draw(st.integers(0, len(encoded) - 2))])
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    for damaged in (cut, bytes(encoded)):
        try:
            found = decode_epochs(damaged)
        except StoreError:
            continue
        # Only a CRC that became 0, or leading zeros, can go unnoticed.
        assert found == epochs or int(damaged.split(b"\n")[1]) == 0


@given(st.binary(max_size=200) | st.text("0123456789-\n", max_size=60).map(str.encode))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        found = decode_epochs(data)
    except StoreError:
        return
    assert decode_epochs(found.encode()) == found
