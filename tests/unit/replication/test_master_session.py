"""The master's side of an HA connection: the first report, frames, heartbeats, rate limit."""

from typing import Any

import pytest

from penstock.errors import ReplicationError
from penstock.replication import master_session
from penstock.replication.epoch_frames import (
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_acknowledgement,
    encode_slave_handshake,
    read_master_frame,
)
from penstock.replication.epochs import Epoch
from penstock.replication.master_session import (
    FRAME_BYTES_LEAST,
    RECEIVED_BYTES_MAX,
    EpochMasterSession,
    MasterSession,
    SessionOptions,
    StaticMasterSession,
)
from penstock.replication.replicas import ReplicaRules, Replicas
from penstock.replication.static_frames import encode_report, read_header
from tests.unit.replication.session_kit import MasterBytes

REPORT_MS, IDLE_MS = 50, 200
RULES = ReplicaRules(
    sync=True, copies=2, in_sync_least=1, all_in_sync=False, lag_bytes_max=1 << 30, lag_ms_max=1000
)
EPOCHS = [(1, 0), (2, 250), (3, 2600)]


def options(**changed: Any) -> SessionOptions:
    defaults = SessionOptions(
        frame_bytes_max=1 << 20, report_ms=REPORT_MS, idle_ms=IDLE_MS, from_first_segment=True
    )
    return defaults._replace(**changed)


def static(log: MasterBytes, peer: str = "10.0.0.2:4000", **changed: Any) -> StaticMasterSession:
    return StaticMasterSession(log, Replicas(RULES), options(**changed), peer, 0)


def greeted(
    log: MasterBytes, *, from_last_file: bool = False, learner: bool = False, **changed: Any
) -> EpochMasterSession:
    """A session after the handshake."""
    session = EpochMasterSession(log, Replicas(RULES), options(**changed), "10.0.0.2:4000", 0)
    handshake = SlaveHandshake(from_last_file, learner, 2, not learner, not learner)
    assert session.receive(encode_slave_handshake(handshake), 0)
    return session


def report(session: MasterSession, offset: int, now_ms: int = 0) -> None:
    kind = encode_report if isinstance(session, StaticMasterSession) else encode_acknowledgement
    assert session.receive(kind(offset), now_ms) == b""


def ranges(session: MasterSession, now_ms: int = 0) -> list[tuple[int, int]]:
    """Begin and end of all frames that can be sent now."""
    found = []
    while (frame := session.next_frame(now_ms)) is not None:
        found.append((frame.offset, frame.offset + frame.length))
        if frame.length == 0:
            break
    return found


# --- the first report ----------------------------------------------------------------------------


def test_nothing_is_sent_before_the_first_report() -> None:
    for session in (static(MasterBytes(0, 500)), greeted(MasterBytes(0, 500, (1, 0)))):
        assert session.next_frame(0) is None
        assert session.next_frame(10 * REPORT_MS) is None
        assert session.due() == IDLE_MS


@pytest.mark.parametrize(
    ("begin", "end", "offset", "position"),
    [
        pytest.param(0, 2500, 0, 0, id="empty"),
        pytest.param(1000, 2500, 0, 1000, id="empty, oldest segment deleted"),
        pytest.param(0, 2500, 1, 1, id="whole log"),
        pytest.param(1000, 2500, 1, 1000, id="whole log, oldest segment deleted"),
        pytest.param(0, 0, 1, 1, id="whole log of an empty master"),
        pytest.param(1000, 2500, 1000, 1000, id="at the begin"),
        pytest.param(1000, 2500, 1700, 1700, id="inside"),
        pytest.param(1000, 2500, 2500, 2500, id="at the end"),
    ],
)
def test_the_first_report_says_where_to_begin(
    begin: int, end: int, offset: int, position: int
) -> None:
    session = static(MasterBytes(begin, end))
    report(session, offset)
    assert session.position == position


def test_an_empty_slave_may_begin_with_the_last_segment() -> None:
    first = static(MasterBytes(0, 2500), from_first_segment=False)
    second = greeted(MasterBytes(0, 2500, (1, 0)), from_last_file=True)
    for session in (first, second):
        report(session, 0)
        assert session.position == 2000


def test_the_handshake_says_where_an_empty_slave_begins() -> None:
    session = greeted(MasterBytes(0, 2500, (1, 0)), from_first_segment=False)
    report(session, 0)
    assert session.position == 0


@pytest.mark.parametrize(("offset", "text"), [(2501, "different"), (999, "deleted")])
def test_a_slave_that_can_not_follow_is_refused(offset: int, text: str) -> None:
    for session in (static(MasterBytes(1000, 2500)), greeted(MasterBytes(1000, 2500, (1, 0)))):
        with pytest.raises(ReplicationError, match=text):
            report(session, offset)
        assert session.position == -1


def test_later_reports_do_not_move_the_position() -> None:
    session = static(MasterBytes(0, 500))
    report(session, 100)
    assert ranges(session) == [(100, 500)]
    report(session, 300)
    assert session.position == 500
    assert session.replica is not None
    assert session.replica.acknowledged == 300


def test_an_empty_slave_repeats_its_first_report_while_the_master_is_empty() -> None:
    log = MasterBytes(0, 0)
    session = static(log)
    report(session, 1)
    assert session.joined
    report(session, 1, REPORT_MS)
    assert ranges(session, REPORT_MS) == [(1, 1)]  # a heartbeat
    log.end = 100
    assert ranges(session, REPORT_MS) == [(1, 100)]


def test_a_report_of_1_acknowledges_nothing() -> None:
    session = static(MasterBytes(0, 100))
    report(session, 1)
    assert session.replica is not None
    assert session.replica.acknowledged == 0


@pytest.mark.parametrize("offset", [499, 701])
def test_an_impossible_acknowledgement_is_refused(offset: int) -> None:
    for session in (static(MasterBytes(0, 700)), greeted(MasterBytes(0, 700, (1, 0)))):
        report(session, 500)
        with pytest.raises(ReplicationError):
            report(session, offset)


def test_reports_arrive_in_any_pieces() -> None:
    sent = encode_report(100) + encode_report(200) + encode_report(300)
    for size in range(1, len(sent) + 1):
        session = static(MasterBytes(0, 500))
        for at in range(0, len(sent), size):
            session.receive(sent[at : at + size], 0)
        assert session.replica is not None
        assert session.replica.acknowledged == 300


def test_a_peer_that_sends_no_reports_is_refused() -> None:
    session = greeted(MasterBytes(0, 500, (1, 0)))
    with pytest.raises(ReplicationError):
        session.receive(b"GET / HTTP/1.1\r\n\r\n", 0)
    session = greeted(MasterBytes(0, 500, (1, 0)))
    session._received += bytes(RECEIVED_BYTES_MAX)  # can't happen with the frames of today
    with pytest.raises(ReplicationError):
        session.receive(b"", 0)


def test_a_slave_that_has_joined_is_told_once() -> None:
    session = static(MasterBytes(0, 500))
    report(session, 100)
    assert not session.joined
    report(session, 500)
    assert session.joined
    report(session, 500)
    assert not session.joined


def test_a_lost_connection_is_noted() -> None:
    session = static(MasterBytes(0, 500))
    session.closed()  # before it has a replica
    report(session, 100)
    session.closed()
    assert session.replicas.slaves == {}


@pytest.mark.parametrize(
    ("peer", "name"), [("10.0.0.2:5000", "10.0.0.2:4000"), ("10.0.0.3:4000", "10.0.0.3:4000")]
)
def test_a_static_slave_that_comes_back_is_known_by_its_host(peer: str, name: str) -> None:
    log, replicas = MasterBytes(0, 500), Replicas(RULES)
    first = StaticMasterSession(log, replicas, options(), "10.0.0.2:4000", 0)
    report(first, 500)
    first.closed()
    second = StaticMasterSession(log, replicas, options(), peer, 0)
    report(second, 500)
    assert replicas.slaves[name] is second.replica


def test_a_connection_whose_handshake_is_late_is_refused() -> None:
    log, replicas = MasterBytes(0, 500, (1, 0)), Replicas(RULES)
    first, second = (EpochMasterSession(log, replicas, options(), "s:1", 0) for _ in range(2))
    handshake = encode_slave_handshake(SlaveHandshake(False, False, 2))
    second.receive(handshake, 0)
    with pytest.raises(ReplicationError, match="connected again"):
        first.receive(handshake, 0)
    first.closed()
    assert replicas.slaves["2"] is second.replica


def test_two_static_slaves_of_one_host_are_two() -> None:
    log, replicas = MasterBytes(0, 500), Replicas(RULES)
    for port in (1, 2):
        report(StaticMasterSession(log, replicas, options(), f"10.0.0.2:{port}", 0), 500)
    assert len(replicas.in_sync) == 2


# --- the handshake -------------------------------------------------------------------------------


def test_the_handshake_is_answered_with_the_epochs() -> None:
    log = MasterBytes(0, 3000, *EPOCHS)
    session = EpochMasterSession(log, Replicas(RULES), options(), "s:1", 0)
    sent = encode_slave_handshake(SlaveHandshake(False, False, 2, True, True))
    assert session.receive(sent[:9], 0) == b""
    answer = session.receive(sent[9:], 0)
    assert read_master_frame(memoryview(answer), 0, len(answer)) == MasterHandshake(
        3000, log.history
    )
    assert session.replica is not None
    assert (session.replica.name, session.replica.acknowledges_flushed) == ("2", True)


def test_a_second_handshake_is_not_answered() -> None:
    """Apache's slaves repeat it if the answer is late."""
    session = greeted(MasterBytes(0, 500, (1, 0)))
    again = encode_slave_handshake(SlaveHandshake(False, False, 2))
    assert session.receive(again + encode_acknowledgement(100), 0) == b""
    assert session.position == 100


def test_handshake_and_report_may_arrive_together() -> None:
    session = EpochMasterSession(MasterBytes(0, 500, (1, 0)), Replicas(RULES), options(), "s:1", 0)
    handshake = encode_slave_handshake(SlaveHandshake(False, False, 2))
    assert session.receive(handshake + encode_acknowledgement(100), 0)
    assert session.position == 100


def test_a_report_before_the_handshake_is_refused() -> None:
    session = EpochMasterSession(MasterBytes(0, 500, (1, 0)), Replicas(RULES), options(), "s:1", 0)
    with pytest.raises(ReplicationError):
        session.receive(encode_acknowledgement(100), 0)


def test_a_learner_gets_the_log_and_does_not_count() -> None:
    session = greeted(MasterBytes(0, 500, (1, 0)), learner=True)
    report(session, 500)
    assert not session.joined
    assert session.replicas.acknowledged(500) == 0


# --- frames --------------------------------------------------------------------------------------


def test_frames_end_with_their_segment() -> None:
    session = static(MasterBytes(0, 2500))
    report(session, 700)
    assert ranges(session) == [(700, 1000), (1000, 2000), (2000, 2500)]


def test_frames_end_with_their_epoch_and_name_it() -> None:
    log = MasterBytes(0, 3000, *EPOCHS)
    session = greeted(log)
    report(session, 0)
    found = []
    while (frame := session.next_frame(0)) is not None:
        header = read_master_frame(memoryview(frame.header), 0, len(frame.header))
        assert isinstance(header, TransferHeader)
        assert (header.offset, header.length) == (frame.offset, frame.length)
        found.append((header.offset, header.length, header.epoch.number, header.epoch.begin))
    assert found == [
        (0, 250, 1, 0),
        (250, 750, 2, 250),
        (1000, 1000, 2, 250),
        (2000, 600, 2, 250),
        (2600, 400, 3, 2600),
    ]


def test_a_log_older_than_its_first_epoch_is_sent_up_to_that() -> None:
    session = greeted(MasterBytes(0, 900, (4, 300)))
    report(session, 100)
    assert ranges(session) == [(100, 300), (300, 900)]


def test_a_new_epoch_ends_the_frames_of_the_old_one() -> None:
    log = MasterBytes(0, 500, (1, 0))
    session = greeted(log)
    report(session, 300)
    log.history.append(2, 500)
    log.end = 600
    assert ranges(session) == [(300, 500), (500, 600)]


def test_a_header_carries_the_confirm_offset() -> None:
    log = MasterBytes(0, 500, (1, 0))
    session = greeted(log)
    report(session, 0)
    log.confirm_offset = 123
    frame = session.next_frame(0)
    assert frame is not None
    header = read_master_frame(memoryview(frame.header), 0, len(frame.header))
    assert header == TransferHeader(0, 500, Epoch(1, 0), 123)


def test_frames_grow_while_the_connection_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_session, "FRAME_BYTES_LEAST", 10)
    session = static(MasterBytes(0, 900), frame_bytes_max=70)
    report(session, 1)
    sizes = []
    for taken in ["at_once"] * 4 + ["late"] * 4:
        frame = session.next_frame(0)
        assert frame is not None
        sizes.append(frame.length)
        session.taken_at_once() if taken == "at_once" else session.taken_late()
    assert sizes == [10, 20, 40, 70, 70, 35, 17, 10]


def test_the_first_frame_is_small() -> None:
    log = MasterBytes(0, 10 * FRAME_BYTES_LEAST)
    log.segment_bytes = log.end
    session = static(log)
    report(session, 1)
    assert session.next_frame(0) == (encode_header_of(1), 1, FRAME_BYTES_LEAST)


def encode_header_of(offset: int) -> bytes:
    return offset.to_bytes(8, "big") + FRAME_BYTES_LEAST.to_bytes(4, "big")


def test_no_frame_is_larger_than_the_limit() -> None:
    """Not even if the limit is below the size of a slow connection."""
    session = static(MasterBytes(0, 900), frame_bytes_max=100)
    report(session, 1)
    session.taken_late()
    session.taken_late()
    assert ranges(session)[0] == (1, 101)


# --- heartbeats, idle connections, rate limit ----------------------------------------------------


def test_a_heartbeat_is_sent_when_nothing_else_is() -> None:
    session = static(MasterBytes(0, 500))
    report(session, 300)
    assert ranges(session, 10) == [(300, 500)]
    assert session.due() == 10 + REPORT_MS
    assert session.next_frame(9 + REPORT_MS) is None
    frame = session.next_frame(10 + REPORT_MS)
    assert frame is not None
    assert read_header(memoryview(frame.header), 0, 12) == (500, 0)
    assert session.next_frame(10 + REPORT_MS) is None
    assert session.due() == 10 + 2 * REPORT_MS


def test_a_heartbeat_does_not_name_an_empty_epoch() -> None:
    session = greeted(MasterBytes(0, 500, (1, 0), (2, 500)))
    report(session, 500)
    frame = session.next_frame(REPORT_MS)
    assert frame is not None
    header = read_master_frame(memoryview(frame.header), 0, len(frame.header))
    assert header == TransferHeader(500, 0, Epoch(1, 0), 500)


def test_a_silent_slave_is_an_error() -> None:
    session = static(MasterBytes(0, 500))
    report(session, 500, 30)
    for beat in range(REPORT_MS, 4 * REPORT_MS + 1, REPORT_MS):
        session.next_frame(beat)
    assert session.due() == 30 + IDLE_MS
    session.check_idle(30 + IDLE_MS)
    with pytest.raises(ReplicationError):
        session.check_idle(31 + IDLE_MS)


def test_the_rate_is_limited() -> None:
    log = MasterBytes(0, 100_000)
    log.segment_bytes = 1 << 20
    session = static(log, rate_bytes_max=1000, frame_bytes_max=2000)
    report(session, 0)
    assert ranges(session, 0) == [(0, 1000)]
    sent, now_ms = 1000, 0
    while now_ms < 20_000:
        now_ms = min(now_ms + 7, max(session.due(), now_ms + 1))
        session.receive(b"", now_ms)
        sent += sum(end - begin for begin, end in ranges(session, now_ms))
    assert 20_000 <= sent <= 21_000


def test_due_says_when_the_rate_limit_allows_more() -> None:
    log = MasterBytes(0, 1600)
    log.segment_bytes = 1 << 20
    session = static(log, rate_bytes_max=1000, report_ms=5000, idle_ms=9000)
    report(session, 0)
    assert ranges(session, 0) == [(0, 1000)]
    due = session.due()
    assert due == 600  # for the rest
    assert session.next_frame(due - 1) is None
    assert ranges(session, due) == [(1000, 1600)]
    assert session.due() == due + 5000


def test_a_heartbeat_is_sent_although_the_rate_is_used_up() -> None:
    session = static(MasterBytes(0, 900), rate_bytes_max=1)
    report(session, 1)
    assert ranges(session, 0) == [(1, 2)]
    assert session.next_frame(REPORT_MS - 1) is None
    assert ranges(session, REPORT_MS) == [(2, 2)]
