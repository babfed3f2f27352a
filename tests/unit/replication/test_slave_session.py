"""The slave's side of an HA connection: reports, frames in pieces, comparison of epochs."""

from typing import Any

import pytest

from penstock.errors import LogsDiffer, ReplicationError
from penstock.replication.epoch_frames import (
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_acknowledgement,
    encode_master_handshake,
    encode_transfer_header,
    read_slave_frame,
)
from penstock.replication.epochs import Epoch
from penstock.replication.slave_session import (
    EpochSlaveSession,
    SlaveOptions,
    SlaveSession,
    StaticSlaveSession,
)
from penstock.replication.static_frames import encode_header, encode_report
from tests.unit.replication.session_kit import SEGMENT_BYTES, SlaveBytes, content, history

REPORT_MS, IDLE_MS = 50, 200


def options(**changed: Any) -> SlaveOptions:
    defaults = SlaveOptions(
        report_ms=REPORT_MS, idle_ms=IDLE_MS, from_first_segment=True, broker_id=7
    )
    return defaults._replace(**changed)


def static(log: SlaveBytes, **changed: Any) -> StaticSlaveSession:
    return StaticSlaveSession(log, options(**changed), 0)


def epochs(log: SlaveBytes, **changed: Any) -> EpochSlaveSession:
    session = EpochSlaveSession(log, options(**changed), 0)
    session.start(0)
    return session


def give(session: SlaveSession, data: bytes, now_ms: int = 0, *, size: int = 1 << 30) -> None:
    """Let a session receive bytes in pieces of a size."""
    for at in range(0, len(data), size):
        session.receive(memoryview(data[at : at + size]), now_ms)


def greet(session: EpochSlaveSession, log_end: int, *master: tuple[int, int]) -> None:
    give(session, encode_master_handshake(MasterHandshake(log_end, history(*master))))


def part(offset: int, length: int) -> bytes:
    return encode_header(offset, length) + content(offset, length)


def transfer(
    offset: int, length: int, epoch: tuple[int, int] = (1, 0), confirm_offset: int = -1
) -> bytes:
    header = TransferHeader(offset, length, Epoch(*epoch), confirm_offset)
    return encode_transfer_header(header) + content(max(offset, 0), length)


# --- the first report ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "end", "from_first", "first"),
    [
        pytest.param(0, 0, True, 1, id="empty"),
        pytest.param(0, 0, False, 0, id="empty, last segment"),
        pytest.param(0, 300, True, 300, id="some"),
        pytest.param(1000, 1300, True, 1300, id="some, retention"),
        pytest.param(1000, 1000, True, 1000, id="empty, not at 0"),
    ],
)
def test_the_first_report_of_the_static_protocol(
    begin: int, end: int, from_first: bool, first: int
) -> None:
    log = SlaveBytes(begin, end)
    session = static(log, from_first_segment=from_first)
    assert session.start(5) == encode_report(first)
    assert log.next_offset == first
    assert session.due() == 5 + REPORT_MS
    assert session.report(5) == b""


@pytest.mark.parametrize(
    ("begin", "end", "first"), [(0, 0, 0), (0, 300, 300), (1000, 1300, 1300), (1000, 1000, 0)]
)
def test_the_first_report_with_epochs(begin: int, end: int, first: int) -> None:
    """An empty log may begin anywhere, wherever it began before."""
    session = epochs(SlaveBytes(begin, end, (1, 0)))
    assert session.report(10 * REPORT_MS) == b""  # before the handshake
    assert session.due() == IDLE_MS
    greet(session, 3000, (1, 0))
    assert session.report(0) == encode_acknowledgement(first)


@pytest.mark.parametrize("kind", ["static", "epochs"])
def test_the_first_report_waits_for_the_flush(kind: str) -> None:
    """The master takes it for an acknowledgement, and the log can't be received twice."""
    log = SlaveBytes(0, 300, (1, 0))
    log.flushed = 200
    if kind == "static":
        session: SlaveSession = static(log)
        assert session.start(0) == b""
        encode = encode_report
    else:
        session, encode = epochs(log), encode_acknowledgement
        greet(session, 500, (1, 0))
    assert session.report(10 * REPORT_MS) == b""
    log.flushed = 300
    assert session.report(10 * REPORT_MS) == encode(300)


def test_nothing_is_received_before_the_epochs_are_stored() -> None:
    """After a crash the log would have no epoch in common with the master's."""
    log = SlaveBytes()
    log.epochs_stored = False
    session = epochs(log)
    greet(session, 500, (1, 0))
    assert session.report(10 * REPORT_MS) == b""
    log.epochs_stored = True
    assert session.report(10 * REPORT_MS) == encode_acknowledgement(0)


def test_the_handshake_says_who_the_slave_is() -> None:
    session = EpochSlaveSession(SlaveBytes(), options(acknowledges_flushed=True), 0)
    sent = session.start(0)
    assert read_slave_frame(memoryview(sent), 0, len(sent)) == SlaveHandshake(
        False, False, 7, True, True
    )
    learner = EpochSlaveSession(SlaveBytes(), options(learner=True, from_first_segment=False), 0)
    sent = learner.start(0)
    assert read_slave_frame(memoryview(sent), 0, len(sent)) == SlaveHandshake(True, True, 7)


# --- reports -------------------------------------------------------------------------------------


def test_reports_follow_the_log_and_repeat() -> None:
    log = SlaveBytes(0, 300)
    session = static(log)
    session.start(0)
    give(session, part(300, 100))
    assert session.report(1) == encode_report(400)
    assert session.report(REPORT_MS) == b""
    assert session.due() == 1 + REPORT_MS
    assert session.report(1 + REPORT_MS) == encode_report(400)
    assert session.report(2 + REPORT_MS) == b""


def test_only_flushed_bytes_are_reported_under_sync_flush() -> None:
    log = SlaveBytes(0, 300)
    log.flushed = 300
    session = static(log)
    session.start(0)
    give(session, part(300, 100))
    assert session.report(0) == b""
    log.flushed = 350
    assert session.report(0) == encode_report(350)


def test_an_empty_slave_repeats_its_first_report() -> None:
    session = static(SlaveBytes())
    session.start(0)
    assert session.report(REPORT_MS) == encode_report(1)


def test_a_silent_master_is_an_error() -> None:
    session = static(SlaveBytes(0, 300))
    session.start(0)
    give(session, encode_header(300, 0), 40)
    session.check_idle(40 + IDLE_MS)
    session.report(REPORT_MS)
    with pytest.raises(ReplicationError):
        session.check_idle(41 + IDLE_MS)


# --- frames --------------------------------------------------------------------------------------


def test_frames_of_the_static_protocol_arrive_in_any_pieces() -> None:
    sent = part(300, 40) + encode_header(340, 0) + part(340, 1) + part(341, 9)
    for size in range(1, len(sent) + 1):
        log = SlaveBytes(0, 300)
        session = static(log)
        session.start(0)
        give(session, sent, size=size)
        assert (log.end, session.master_end) == (350, 350)


def test_frames_with_epochs_arrive_in_any_pieces() -> None:
    handshake = encode_master_handshake(MasterHandshake(900, history((1, 0), (2, 320))))
    sent = handshake + transfer(300, 20) + transfer(320, 0, (1, 0), 310)
    sent += transfer(320, 9, (2, 320), 320)
    for size in range(1, len(sent) + 1):
        log = SlaveBytes(0, 300, (1, 0))
        session = epochs(log)
        give(session, sent, size=size)
        assert (log.end, log.confirmed, session.master_end) == (329, 320, 900)
        assert log.history == history((1, 0), (2, 320))


@pytest.mark.parametrize("offset", [0, 299, 301, 1000])
def test_a_frame_for_another_offset_is_refused(offset: int) -> None:
    first, second = static(SlaveBytes(0, 300)), epochs(SlaveBytes(0, 300, (1, 0)))
    first.start(0)
    greet(second, 900, (1, 0))
    for session, frame in ((first, part(offset, 10)), (second, transfer(offset, 10))):
        with pytest.raises(ReplicationError, match="instead of 300"):
            give(session, frame)


def test_an_empty_log_begins_with_a_segment_of_the_master() -> None:
    log = SlaveBytes()
    session = static(log, from_first_segment=False)
    session.start(0)
    give(session, part(2 * SEGMENT_BYTES, 10))
    assert (log.begin, log.end) == (2 * SEGMENT_BYTES, 2 * SEGMENT_BYTES + 10)
    assert session.report(0) == encode_report(log.end)


def test_an_empty_log_does_not_begin_inside_a_segment() -> None:
    session = static(SlaveBytes(), from_first_segment=False)
    session.start(0)
    with pytest.raises(ReplicationError):
        give(session, part(SEGMENT_BYTES + 1, 10))


def test_an_empty_log_that_began_elsewhere_begins_again() -> None:
    """It began with the last segment of a master that was replaced before it sent anything."""
    log = SlaveBytes(5 * SEGMENT_BYTES, 5 * SEGMENT_BYTES, (1, 0))
    session = epochs(log)
    greet(session, 1500, (1, 0), (2, 1400))
    assert session.report(0) == encode_acknowledgement(0)
    give(session, transfer(SEGMENT_BYTES, 10))
    assert (log.begin, log.end) == (SEGMENT_BYTES, SEGMENT_BYTES + 10)


def test_heartbeats_of_an_empty_apache_master_are_accepted() -> None:
    session = epochs(SlaveBytes())
    greet(session, 0, (1, 0))
    give(session, transfer(-1, 0))


# --- epochs --------------------------------------------------------------------------------------


def test_a_second_handshake_is_refused() -> None:
    session = epochs(SlaveBytes())
    greet(session, 500, (1, 0))
    with pytest.raises(ReplicationError, match="second handshake"):
        greet(session, 500, (1, 0))


def test_the_log_is_refused_before_the_handshake() -> None:
    with pytest.raises(ReplicationError, match="before the handshake"):
        give(epochs(SlaveBytes()), transfer(0, 10))


def test_the_epochs_of_the_master_are_taken_over() -> None:
    log = SlaveBytes(0, 300, (1, 0))
    greet(epochs(log), 900, (1, 0), (2, 700))
    assert log.follows == [history((1, 0), (2, 700))]


def test_an_epoch_that_begins_during_the_connection_is_taken_over() -> None:
    log = SlaveBytes(0, 300, (1, 0))
    session = epochs(log)
    greet(session, 300, (1, 0))
    give(session, transfer(300, 50))
    give(session, transfer(350, 10, (2, 350)) + transfer(360, 10, (2, 350)))
    assert log.follows == [history((1, 0)), history((1, 0), (2, 350))]


def test_the_first_epoch_may_begin_during_the_connection() -> None:
    log = SlaveBytes()
    session = epochs(log)
    greet(session, 0)
    give(session, transfer(0, 10, (0, 0)))  # of a log that is older than its first epoch
    give(session, transfer(10, 10, (1, 10)))
    assert log.follows == [history(), history((1, 10))]


@pytest.mark.parametrize("stale", [[], [(1, 0)], [(1, 0), (2, 100)]])
def test_a_replaced_master_is_refused(stale: list[tuple[int, int]]) -> None:
    log = SlaveBytes(0, 300, (1, 0), (3, 100))
    with pytest.raises(ReplicationError, match="not the master any more"):
        greet(epochs(log), 900, *stale)
    assert log.follows == []


def test_a_master_older_than_the_epoch_that_the_slave_was_told_is_refused() -> None:
    log = SlaveBytes(0, 300, (1, 0))
    with pytest.raises(ReplicationError, match="not the master any more"):
        greet(epochs(log, epoch_least=3), 900, (1, 0), (2, 300))
    greet(epochs(log, epoch_least=3), 900, (1, 0), (3, 300))


@pytest.mark.parametrize(
    ("mine", "end", "theirs", "theirs_end", "offset"),
    [
        pytest.param([(1, 0)], 300, [(1, 0), (2, 200)], 900, 200, id="more of an old epoch"),
        pytest.param([(1, 0)], 300, [(1, 0)], 250, 250, id="the master has lost its tail"),
        pytest.param([(1, 0), (2, 200)], 300, [(1, 0), (3, 200)], 900, 200, id="two at one offset"),
        pytest.param([(1, 0), (2, 200)], 300, [(1, 0), (3, 150)], 900, 150, id="two successors"),
        pytest.param([(1, 0)], 300, [(1, 0), (2, 0)], 900, 0, id="nothing is equal"),
    ],
)
def test_a_log_that_differs_must_be_truncated(
    mine: list[tuple[int, int]],
    end: int,
    theirs: list[tuple[int, int]],
    theirs_end: int,
    offset: int,
) -> None:
    log = SlaveBytes(0, end, *mine)
    session = epochs(log)
    with pytest.raises(LogsDiffer) as caught:
        greet(session, theirs_end, *theirs)
    assert caught.value.offset == offset
    assert log.follows == []
    assert session.report(10 * REPORT_MS) == b""


@pytest.mark.parametrize(
    ("begin", "mine", "theirs"),
    [
        pytest.param(0, [(1, 0)], [(2, 0)], id="other logs"),
        pytest.param(0, [], [(1, 0)], id="a log without epochs"),
        pytest.param(200, [(1, 0), (2, 250)], [(1, 0), (3, 150)], id="equal part is deleted"),
    ],
)
def test_a_log_with_nothing_in_common_is_refused(
    begin: int, mine: list[tuple[int, int]], theirs: list[tuple[int, int]]
) -> None:
    with pytest.raises(ReplicationError) as caught:
        greet(epochs(SlaveBytes(begin, 300, *mine)), 900, *theirs)
    assert not isinstance(caught.value, LogsDiffer)


def test_a_slave_that_lost_its_tail_reports_its_own_end() -> None:
    """The epoch is stored before its bytes: it may begin after the end of the log."""
    log = SlaveBytes(0, 300, (1, 0), (2, 400))
    session = epochs(log)
    greet(session, 900, (1, 0), (2, 400))
    assert session.report(0) == encode_acknowledgement(300)
