"""Keeps a view up to date: reads all keys, then watches their changes.

If the stream ends, the watch goes on at the next revision, at another member if necessary. If that
revision is compacted already, everything is read again.

A stream may be open and dead: its member may be stopped or separated, and etcd says nothing for
minutes. So every controller writes a key of its own every few seconds. If the watch does not report
it soon, the stream is dropped and everything is read again, from another member.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.clock import Clock, pause
from penstock.errors import EtcdError
from penstock.server.controller.etcd.controller_lease import ControllerLease
from penstock.server.controller.etcd.etcd_client import EtcdClient, parse
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_messages import (
    KeyValue,
    Message,
    PutAnswer,
    RangeAnswer,
    WatchAnswer,
    WatchLine,
    after_prefix,
    encode_text,
    prefix_request,
    put_request,
)
from penstock.server.controller.etcd.http_connection import HttpError
from penstock.server.controller.etcd.view import View

log = logging.getLogger(__name__)

PAGE_KEYS = 500
"""Keys in one answer."""
TICK_MS = 5_000
"""How often the own key is written. The watch must report it before the next time."""
RETRY_MS = 100
"""Until the next attempt; it doubles."""
RETRY_MS_MAX = 5_000


class Watch:
    """Watches all keys of a prefix; `run` and `tick` are tasks."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        view: View,
        lease: ControllerLease,
        clock: Clock,
        *,
        own: int,
        address: str,
    ) -> None:
        """`own` is the number of this controller; its address is the value of its own key."""
        self._client = client
        self._keys = keys
        self._view = view
        self._lease = lease
        self._clock = clock
        self._address = address.encode()
        self._own = keys.controller(own)
        self._revision = 0
        """All changes up to here are in the view; 0: everything has to be read."""
        self._began = 0
        """The revision of etcd when the present stream began."""
        self._streaming: asyncio.Task[None] | None = None
        self.resyncs = 0
        """How often everything was read."""

    async def run(self) -> None:
        """Watch until cancelled."""
        retry_ms = RETRY_MS
        while True:
            began = self._view.interruptions
            try:
                if not self._revision:
                    await self.read_all()
                self._streaming = asyncio.ensure_future(self._stream())
                try:
                    await asyncio.shield(self._streaming)
                finally:
                    self._streaming.cancel()
            except EtcdError as error:
                log.warning("the watch of etcd was interrupted: %s", error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                log.warning("the watch of etcd reports nothing: reading everything again")
            if self._view.interruptions != began:
                retry_ms = RETRY_MS  # it has worked for a while
            await pause(self._clock, retry_ms)
            retry_ms = min(2 * retry_ms, RETRY_MS_MAX)

    async def tick(self) -> None:
        """Write the own key until cancelled, and check that the watch reports it."""
        while True:
            revision = 0
            try:
                if self._lease.id:
                    revision = await self._write_own()
            except EtcdError as error:
                log.warning("can't write to etcd: %s", error)
            await pause(self._clock, TICK_MS)
            streaming = self._streaming
            if (
                self._view.tick_revision < revision
                and streaming is not None
                and not streaming.done()
            ):
                self._revision = 0
                self._client.leave()
                streaming.cancel()

    async def read_all(self) -> None:
        """Read all keys. Raises EtcdError."""
        found: list[KeyValue] = []
        request: Message = {**prefix_request(self._keys.all), "limit": str(PAGE_KEYS)}
        answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
        found += answer.kvs
        revision = answer.header.revision
        while answer.more and answer.kvs:
            request |= {
                "key": encode_text(answer.kvs[-1].key + b"\0"),
                "revision": str(revision),
            }
            answer = await self._client.call("/v3/kv/range", request, RangeAnswer)
            found += answer.kvs
        self._view.reset(found, revision)
        self._revision = revision
        self.resyncs += 1

    # --- the stream

    async def _stream(self) -> None:
        message = {
            "create_request": {
                "key": encode_text(self._keys.all),
                "range_end": encode_text(after_prefix(self._keys.all)),
                "start_revision": str(self._revision + 1),
            }
        }
        async with self._client.stream("/v3/watch", message) as lines:
            async for line in lines:  # all changes of one revision are in one line
                answer = parse(line, WatchLine).result
                if answer is None:
                    raise HttpError("the watch was refused", sent=True)
                if answer.canceled:
                    self._canceled(answer)
                    return
                self._take(answer)
        raise EtcdError("etcd has ended the watch")

    def _canceled(self, answer: WatchAnswer) -> None:
        if answer.compact_revision:
            log.info("etcd has compacted revision %d: reading everything", self._revision)
        self._revision = 0

    def _take(self, answer: WatchAnswer) -> None:
        if answer.created:
            self._began = answer.header.revision
            self._view.interruptions += 1
        for event in answer.events:
            if event.type == "DELETE":
                self._view.deleted(event.kv, late=event.kv.mod_revision <= self._began)
            else:
                self._view.changed(event.kv)
            self._revision = max(self._revision, event.kv.mod_revision)

    # --- the own key

    async def _write_own(self) -> int:
        """Write the own key; its revision."""
        request = put_request(self._own, self._address, self._lease.id)
        answer = await self._client.call("/v3/kv/put", request, PutAnswer)
        return answer.header.revision
