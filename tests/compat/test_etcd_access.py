"""etcd with users and with TLS."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import EtcdError, EtcdRefused
from tests.integration.certificates import Pair, make_pair

from .etcd_cluster import EtcdCluster
from .etcd_controllers import controller, until

pytestmark = [pytest.mark.compat, pytest.mark.slow]

PREFIX = "/p/"


@pytest.fixture(scope="module")
def with_users(go_tool: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A member with a user `controller` who may use the keys of one prefix."""
    key = base64.b64encode(PREFIX.encode()).decode()
    end = base64.b64encode(PREFIX[:-1].encode() + b"0").decode()
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    with EtcdCluster(tmp_path_factory.mktemp("users"), members=1) as etcd:
        for path, message in (
            ("user/add", {"name": "root", "password": "r"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "keys"}),
            ("role/grant", {"name": "keys", "perm": permission}),
            ("user/add", {"name": "controller", "password": "secret"}),
            ("user/grant", {"user": "controller", "role": "keys"}),
            ("enable", {}),
        ):
            answer = etcd.call(f"/v3/auth/{path}", message, 0)
            assert "header" in answer, (path, answer)
        yield etcd


def test_a_controller_signs_in_and_does_it_again_when_needed(with_users: EtcdCluster) -> None:
    user = {"etcd_prefix": PREFIX, "etcd_user": "controller", "etcd_password": "secret"}

    async def main() -> None:
        async with controller(with_users.endpoints, **user) as one:
            await one.count("b")
            # A restarted member does not know the token any more.
            with_users.kill(0)
            await asyncio.to_thread(with_users.restart, 0)
            await one.count("b")
            assert await one.counted("b") == 2
            await until(lambda: one.store.last_seen("b") is not None, "the watch works")

    asyncio.run(main())


@pytest.mark.parametrize(
    "user",
    [
        {"etcd_user": "controller", "etcd_password": "wrong"},
        {"etcd_user": "nobody", "etcd_password": "secret"},
    ],
    ids=["password", "user"],
)
def test_a_wrong_user_or_password_is_reported(
    with_users: EtcdCluster, user: dict[str, str]
) -> None:
    async def main() -> None:
        with pytest.raises(EtcdRefused, match="authentication failed"):
            async with controller(with_users.endpoints, etcd_prefix=PREFIX, **user):
                pass

    asyncio.run(main())


def test_other_keys_are_refused(with_users: EtcdCluster) -> None:
    async def main() -> None:
        user = {"etcd_prefix": "/other/", "etcd_user": "controller", "etcd_password": "secret"}
        with pytest.raises(EtcdRefused, match="permission denied"):
            async with controller(with_users.endpoints, **user) as one:
                await one.count("b")

    asyncio.run(main())


# --- TLS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("certificate"), "etcd")


@pytest.fixture(scope="module")
def with_tls(
    go_tool: None, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdCluster]:
    """A member that asks for client certificates, too."""
    with EtcdCluster(
        tmp_path_factory.mktemp("tls"),
        members=1,
        tls=pair,
        options=("--client-cert-auth", "--trusted-ca-file", str(pair.certificate)),
    ) as etcd:
        yield etcd


def test_tls_with_certificates_on_both_sides(with_tls: EtcdCluster, pair: Pair) -> None:
    async def main() -> None:
        async with controller(
            with_tls.endpoints,
            etcd_ca=str(pair.certificate),
            etcd_certificate=str(pair.certificate),
            etcd_key=str(pair.key),
        ) as one:
            await one.count("b")
            await until(lambda: one.store.last_seen("b") is not None, "the watch works")

    asyncio.run(main())


def test_an_untrusted_certificate_is_refused(
    with_tls: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_pair(tmp_path, "other")
    monkeypatch.setattr("penstock.server.controller.etcd.etcd_backend.START_MS", 100)
    monkeypatch.setattr("penstock.server.controller.etcd.etcd_client.CALL_MS", 2_000)

    async def main() -> None:
        async with controller(with_tls.endpoints, etcd_ca=str(other.certificate)) as one:
            with pytest.raises(EtcdError, match="certificate is not trusted"):
                await one.count("b")

    asyncio.run(main())
