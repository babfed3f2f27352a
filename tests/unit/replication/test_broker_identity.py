"""The files in which a broker keeps its id: durable, in RocketMQ's format."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadSetting, StoreDamaged
from penstock.replication.broker_identity import (
    FILE,
    TEMPORARY,
    BrokerIdentity,
    forget_application,
    load_identity,
    save_identity,
)
from penstock.store.disk import Disk
from tests.depth import rounds
from tests.store_kit import CrashError, CrashingDisk

GIVEN = BrokerIdentity("cluster", "broker-a", 2)
APPLIED = GIVEN._replace(check_code="10.0.0.1:10911;1700000000000")


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_the_files_have_rocketmqs_format(disk: Disk, tmp_path: Path) -> None:
    save_identity(disk, tmp_path, APPLIED)
    text = (tmp_path / TEMPORARY).read_text()
    assert text == "cluster#broker-a#2#10.0.0.1:10911;1700000000000"
    assert not (tmp_path / FILE).exists()
    save_identity(disk, tmp_path, GIVEN)
    assert (tmp_path / FILE).read_text() == "cluster#broker-a#2"
    assert not (tmp_path / TEMPORARY).exists()


def test_an_empty_directory_has_no_identity(disk: Disk, tmp_path: Path) -> None:
    assert load_identity(disk, tmp_path) is None
    assert load_identity(disk, tmp_path, TEMPORARY) is None
    forget_application(disk, tmp_path)


def test_rocketmqs_line_feed_is_read(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("c#b#7\n")
    assert load_identity(disk, tmp_path) == BrokerIdentity("c", "b", 7)


@pytest.mark.parametrize("data", [b"c", b"c#b", b"c#b#", b"c#b#x", b"c#b#1x", b"\xff\xfe", b"\n"])
def test_something_else_is_refused(disk: Disk, tmp_path: Path, data: bytes) -> None:
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(StoreDamaged):
        load_identity(disk, tmp_path)


def test_the_identity_of_another_broker_is_refused() -> None:
    GIVEN.check("cluster", "broker-a")
    for names in (("cluster", "broker-b"), ("other", "broker-a")):
        with pytest.raises(BadSetting):
            GIVEN.check(*names)


def test_an_application_is_forgotten_with_its_backup(disk: Disk, tmp_path: Path) -> None:
    save_identity(disk, tmp_path, APPLIED)
    save_identity(disk, tmp_path, APPLIED._replace(replica_id=3))
    forget_application(disk, tmp_path)
    assert load_identity(disk, tmp_path, TEMPORARY) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", range(8))
def test_a_crash_loses_neither_the_id_nor_the_check_code(tmp_path: Path, steps: int) -> None:
    """Otherwise the broker would get a second id, and the first one would stay in the set."""
    save_identity(Disk(), tmp_path, APPLIED)
    with contextlib.suppress(CrashError):
        save_identity(CrashingDisk(steps), tmp_path, GIVEN)
    found = load_identity(Disk(), tmp_path)
    applied = load_identity(Disk(), tmp_path, TEMPORARY)
    assert found in (GIVEN, None)
    assert found == GIVEN or applied == APPLIED


NAMES = st.text("abc-_.äé中0", min_size=1, max_size=20)


@settings(max_examples=rounds(ci=30, proof=500))
@given(NAMES, NAMES, st.integers(0, 2**63 - 1), st.none() | st.integers(0, 2**53))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: str,
    name: str,
    replica_id: int,
    time_ms: int | None,
) -> None:
    root = tmp_path_factory.mktemp("identity")
    code = "" if time_ms is None else f"host:1;{time_ms}"
    identity = BrokerIdentity(cluster, name, replica_id, code)
    save_identity(Disk(), root, identity)
    assert load_identity(Disk(), root, TEMPORARY if code else FILE) == identity
