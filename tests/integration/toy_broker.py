"""A replica that has no store: it gets an id, sends heartbeats, and is told who the master is."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self

from penstock.transport.peer import Peer, Response, Sign
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.output import response

CALL_MS = 5_000
HEARTBEAT_S = 0.2
JSON = 0


class ToyBroker:
    """A replica of a broker set; an async context manager."""

    def __init__(
        self,
        name: str,
        controllers: list[str],
        *,
        timeout_ms: int = 2_000,
        sign: Sign | None = None,
    ) -> None:
        self.name = name
        self.id = 0
        self.address = ""
        self.told: list[dict[str, str]] = []
        """The fields of the notifications."""
        self._timeout_ms = timeout_ms
        self._peers = [Peer(address, sign=sign) for address in controllers]
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()

    async def join(self) -> None:
        """Get an id, register, ask for an election, and send heartbeats from now on."""
        names = {"clusterName": "c", "brokerName": self.name}
        answer = await self.call(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, names)
        self.id = int((answer.ext or {})["nextBrokerId"])
        applied = {
            **names,
            "appliedBrokerId": str(self.id),
            "registerCheckCode": f"{self.address};1",
        }
        assert (await self.call(RequestCode.CONTROLLER_APPLY_BROKER_ID, applied)).code == 0
        self.beat()
        await self.elect()

    def beat(self) -> None:
        """Send heartbeats from now on."""
        self._tasks = {asyncio.ensure_future(self._heartbeats(peer)) for peer in self._peers}

    async def elect(self, *, designated: bool = False) -> Response:
        fields = {
            "clusterName": "c",
            "brokerName": self.name,
            "brokerId": str(self.id),
            "designateElect": str(designated).lower(),
        }
        return await self.call(RequestCode.CONTROLLER_ELECT_MASTER, fields)

    async def alter_in_sync(self, members: list[int], epoch: int, in_sync_epoch: int) -> Response:
        fields = {
            "brokerName": self.name,
            "masterBrokerId": str(self.id),
            "masterEpoch": str(epoch),
        }
        body = {"syncStateSet": members, "syncStateSetEpoch": in_sync_epoch}
        data = json.dumps(body).encode()
        return await self.call(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, fields, data)

    async def heartbeat(self, peer: Peer | None = None) -> Response:
        fields = {
            "clusterName": "c",
            "brokerName": self.name,
            "brokerId": str(self.id),
            "brokerAddr": self.address,
            "heartbeatTimeoutMills": str(self._timeout_ms),
        }
        return await (peer or self._peers[0]).call(
            RequestCode.BROKER_HEARTBEAT, fields, timeout_ms=CALL_MS
        )

    async def call(self, code: int, fields: dict[str, str], body: bytes = b"") -> Response:
        return await self._peers[0].call(code, fields, body, timeout_ms=CALL_MS)

    async def be_silent(self) -> None:
        """Send no heartbeats any more; connections stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """Close all sockets, as the end of the process does."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self.be_silent()
        for peer in self._peers:
            await peer.close()

    async def _heartbeats(self, peer: Peer) -> None:
        while True:
            try:
                await self.heartbeat(peer)
            except Exception:  # the controller is not there
                await peer.close()
                return
            await asyncio.sleep(HEARTBEAT_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                size = int.from_bytes(frame[:4], "big") & 0xFFFFFF
                header: dict[str, Any] = json.loads(frame[4 : 4 + size])
                assert header["code"] == RequestCode.NOTIFY_BROKER_ROLE_CHANGED
                self.told.append(header["extFields"])
                writer.write(response(ResponseCode.SUCCESS, header["opaque"], JSON))
        except (EOFError, OSError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def describe(address: str, name: str) -> dict[str, Any]:
    """What a controller says of a broker set; empty if it does not know it."""
    peer = Peer(address)
    try:
        answer = await peer.call(
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
            {},
            json.dumps([name]).encode(),
            timeout_ms=CALL_MS,
        )
    finally:
        await peer.close()
    assert answer.code == 0, answer.remark
    found: dict[str, Any] = json.loads(answer.body)["replicasInfoTable"]
    return found.get(name, {})
