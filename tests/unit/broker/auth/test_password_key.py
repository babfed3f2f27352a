"""Encryption of passwords at rest, and its key file."""

import json
import os
import stat
from pathlib import Path

import pytest

from penstock.broker.auth.password_key import PasswordKey
from penstock.broker.auth.users import User
from penstock.config import AccessConfig, Settings
from penstock.errors import BodyError, StoreDamaged
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BrokerFixture


def settings(**access: str) -> Settings:
    return Settings(
        access=AccessConfig(authentication=True, initial_user="root:root-password", **access),
        store=small_config(sync_flush=False),
    )


@pytest.mark.parametrize("password", ["p", "x" * 33, "x" * 1_000, "Schlüssel 密码", "\ud800"])
def test_a_password_is_decrypted_by_its_key_for_its_user(password: str) -> None:
    key = PasswordKey()
    stored = key.encrypt("ann", password)
    assert key.decrypt("ann", stored) == password
    assert key.encrypt("ann", password) != stored, "each has its own nonce"
    for other, user in ((PasswordKey(), "ann"), (key, "bob")):
        with pytest.raises(BodyError, match="another key"):
            other.decrypt(user, stored)


@pytest.mark.parametrize("change", [0, 20, -1])
def test_a_changed_password_is_refused(change: int) -> None:
    key = PasswordKey()
    text = bytearray(key.encrypt("ann", "password of ann").encode())
    text[change] = ord("A") if text[change] != ord("A") else ord("B")
    for stored in (text.decode(), "", "AAAA", "?"):
        with pytest.raises(BodyError):
            key.decrypt("ann", stored)


def test_a_broker_stores_no_password_in_plain_text(tmp_path: Path) -> None:
    broker = BrokerFixture(tmp_path, settings())
    broker.context.access.table.put_user(User.of("ann", "ann-password"), broker.now_ms)
    broker.close()
    config = tmp_path / "config"
    for path in config.iterdir():
        assert b"-password" not in path.read_bytes(), path
    key = config / "penstock-access.key"
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    again = BrokerFixture(tmp_path, settings())
    assert again.context.access.table.users["ann"].password == "ann-password"
    again.close()


def test_passwords_in_plain_text_are_encrypted_at_the_next_start(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    user = {"username": "ann", "password": "ann-password", "userType": "Super"}
    for name in ("penstock-access.json", "penstock-access.json.bak"):
        (config / name).write_text(json.dumps({"format": 1, "users": [user], "acls": []}))
    broker = BrokerFixture(tmp_path, settings())
    assert broker.context.access.table.users["ann"].password == "ann-password"
    for path in config.glob("penstock-access*"):
        assert b"ann-password" not in path.read_bytes(), path
    broker.close()


def test_the_key_may_be_outside_of_the_store(tmp_path: Path) -> None:
    key = tmp_path / "access.key"
    store = tmp_path / "store"
    store.mkdir()
    BrokerFixture(store, settings(key_file=str(key))).close()
    assert len(key.read_text()) == 64
    assert not (store / "config" / "penstock-access.key").exists()
    key.rename(tmp_path / "moved")
    with pytest.raises(StoreDamaged, match="another key"):
        BrokerFixture(store, settings(key_file=str(key)))
    assert not key.exists(), "a new key would hide the loss of the old one"


def test_lost_users_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    BrokerFixture(tmp_path, settings()).close()
    assert "penstock-access" not in caplog.text
    (tmp_path / "config" / "penstock-access.json").unlink()
    BrokerFixture(tmp_path, settings()).close()
    assert "penstock-access.json is missing: using the .bak" in caplog.text
    for path in (tmp_path / "config").glob("penstock-access.json*"):
        path.unlink()
    caplog.clear()
    BrokerFixture(tmp_path, settings()).close()
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert "users and access lists are lost" in record.getMessage()


def test_a_damaged_key_file_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "access.key"
    for content in (b"", b"00" * 31, b"xx" * 32, b"\xff" * 64):
        key.write_bytes(content)
        with pytest.raises(StoreDamaged, match="hex digits"):
            PasswordKey.load(key)


def test_without_users_there_is_no_key_file(tmp_path: Path) -> None:
    BrokerFixture(tmp_path, Settings(store=small_config(sync_flush=False))).close()
    assert not (tmp_path / "config" / "penstock-access.key").exists()
