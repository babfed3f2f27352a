"""The authentication of Penstock peers: golden bytes, pieces of input, wrong secrets, replay."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ReplicationError
from penstock.replication.authentication import MasterAuthentication, SlaveAuthentication

SECRET = b"between replicas"
SLAVE_NONCE, MASTER_NONCE = bytes(range(32)), bytes(range(100, 132))
HELLO = b"PENSTHA1" + SLAVE_NONCE


def proof(label: bytes, *, secret: bytes = SECRET) -> bytes:
    return hmac.new(secret, label + SLAVE_NONCE + MASTER_NONCE, hashlib.sha256).digest()


def master(secret: bytes = SECRET) -> MasterAuthentication:
    return MasterAuthentication(secret, MASTER_NONCE)


def slave(secret: bytes = SECRET) -> SlaveAuthentication:
    return SlaveAuthentication(secret, SLAVE_NONCE)


def test_golden_bytes() -> None:
    a, b = master(), slave()
    assert b.hello() == HELLO
    challenge = a.receive(HELLO)
    assert challenge == MASTER_NONCE + proof(b"master")
    assert not a.done
    answer = b.receive(challenge)
    assert answer == proof(b"slave")
    assert (b.done, b.rest) == (True, b"")
    assert a.receive(answer) == b""
    assert (a.done, a.rest) == (True, b"")


@given(st.data(), st.binary(max_size=20))
def test_input_arrives_in_pieces_of_any_length(data: st.DataObject, after: bytes) -> None:
    a, b = master(), slave()
    for peer, needed, extra, expected in (
        (a, HELLO, b"", MASTER_NONCE + proof(b"master")),
        (b, MASTER_NONCE + proof(b"master"), after, proof(b"slave")),
        (a, proof(b"slave"), after, b""),
    ):
        sent = b""
        cuts = sorted(data.draw(st.lists(st.integers(0, len(needed) - 1), max_size=4)))
        for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
            assert not peer.done
            sent += peer.receive((needed + extra)[begin:end])
        assert sent == expected
    assert (a.rest, b.rest) == (after, after)


def test_a_slave_with_another_secret_is_refused() -> None:
    a = master()
    a.receive(HELLO)
    with pytest.raises(ReplicationError, match="slave"):
        a.receive(proof(b"slave", secret=b"wrong"))
    assert not a.done


def test_a_master_with_another_secret_is_refused() -> None:
    b = slave()
    with pytest.raises(ReplicationError, match="master"):
        b.receive(master(b"wrong").receive(b.hello()))
    assert not b.done


def test_the_masters_own_proof_is_no_proof_of_a_slave() -> None:
    a = master()
    challenge = a.receive(HELLO)
    with pytest.raises(ReplicationError):
        a.receive(challenge[32:])


def test_a_recorded_proof_is_useless_for_another_nonce() -> None:
    other = MasterAuthentication(SECRET, bytes(32))
    other.receive(HELLO)
    with pytest.raises(ReplicationError):
        other.receive(proof(b"slave"))
    b = SlaveAuthentication(SECRET, bytes(32))
    with pytest.raises(ReplicationError):
        b.receive(MASTER_NONCE + proof(b"master"))


@pytest.mark.parametrize("hello", [b"\0", b"PENSTHA2", bytes(8), b"\0\0\0\1\0\0\0\0" + bytes(8)])
def test_a_peer_that_does_not_authenticate_itself_is_refused_at_once(hello: bytes) -> None:
    """The first bytes of an Apache slave, for example."""
    with pytest.raises(ReplicationError, match="does not authenticate itself"):
        master().receive(hello)


@given(st.binary(max_size=120))
def test_any_bytes_are_waited_for_or_refused(data: bytes) -> None:
    for peer in (master(), slave()):
        try:
            peer.receive(data)
        except ReplicationError:
            continue
        assert not peer.done


def test_secrets_and_nonces_are_checked() -> None:
    with pytest.raises(AssertionError):
        MasterAuthentication(b"", MASTER_NONCE)
    with pytest.raises(AssertionError):
        SlaveAuthentication(SECRET, b"short")
