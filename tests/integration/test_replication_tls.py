"""The HA port with TLS that is enforced, and slaves with and without a certificate."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import Settings, TlsConfig
from penstock.transport.peer import Peer
from penstock.transport.tls import outgoing_context
from tests.integration import certificates
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import PROTOCOLS, Pair, assert_equal, has_failed, until


class TlsPair(Pair):
    """A master and a slave with TLS settings of their own."""

    def __init__(self, root: Path, **replication: Any) -> None:
        super().__init__(root, **replication)
        self.tls: dict[str, TlsConfig] = {}

    def settings(self, name: str, **replication: Any) -> Settings:
        found = super().settings(name, **replication)
        return msgspec.structs.replace(found, tls=self.tls[name])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_slaves_with_a_certificate_can_connect(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
) -> None:
    own = certificates.make_pair(tmp_path / "own", "replica")
    other = certificates.make_pair(tmp_path / "other", "other")

    def files(pair: certificates.Pair) -> dict[str, str]:
        return {"certificate": str(pair.certificate), "key": str(pair.key)}

    trusted = {"outgoing": True, "outgoing_ca": str(own.certificate)}
    known = TlsConfig(**files(own), **trusted)  # type: ignore[arg-type]
    refused = {
        "without TLS": TlsConfig(),
        "without a certificate": TlsConfig(**trusted),  # type: ignore[arg-type]
        "with an unknown certificate": TlsConfig(**files(other), **trusted),  # type: ignore[arg-type]
        "that does not trust the master": TlsConfig(
            **files(own), outgoing=True, outgoing_ca=str(other.certificate)
        ),
    }
    pair = TlsPair(tmp_path, protocol=protocol)
    pair.tls["master"] = TlsConfig(
        mode="enforcing", client_auth="require", client_ca=str(own.certificate), **files(own)
    )

    async def body() -> None:
        async with pair.broker("master") as (plain, master):
            client = Peer(plain.address, ssl=outgoing_context(known))
            assert (await send(client, 0)).code == 0
            for name, tls in refused.items():
                pair.tls["slave"] = tls
                async with pair.broker("slave") as (_, slave):
                    await until(partial(has_failed, slave))
                    assert slave.broker.context.store.log.end == 0, f"a slave {name}"
            pair.tls["slave"] = known
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)
                assert slave.replication.metadata is not None
                slave.replication.metadata.set_master(plain.address)
                await until(lambda: slave.broker.role.master_online)  # and the tables
            await client.close()

    run(body())
