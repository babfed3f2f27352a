"""The lease of a controller: what it writes about itself and about replicas vanishes with it."""

from __future__ import annotations

import logging
import secrets
from typing import Final

from penstock.clock import Clock, pause
from penstock.errors import EtcdError, EtcdRefused
from penstock.server.controller.etcd.etcd_client import FAILED_PRECONDITION, EtcdClient, parse
from penstock.server.controller.etcd.etcd_messages import KeepAliveLine, LeaseAnswer, PutAnswer

log = logging.getLogger(__name__)

TTL_S: Final = 3
"""The reports of a controller that has died count for so long. If a master dies with a controller,
as when they share a machine, it is replaced after that. etcd's shortest is 2 s."""
RENEW_MS: Final = TTL_S * 1000 // 3
NUMBER_MAX: Final = (1 << 63) - 1


def random_number() -> int:
    """A number that nobody else has chosen."""
    return secrets.randbelow(NUMBER_MAX) + 1


class ControllerLease:
    """A lease that is renewed; `run` is a task."""

    def __init__(self, client: EtcdClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self.id = 0
        """0: there is none at present."""
        self._renewed_ms = clock.monotonic_ms()

    @property
    def age_ms(self) -> int:
        """For how long etcd has not confirmed this controller."""
        return self._clock.monotonic_ms() - self._renewed_ms

    async def run(self) -> None:
        """Get a lease and renew it, until cancelled."""
        while True:
            try:
                if self.id and not await self._renewed():
                    log.warning("the lease of this controller in etcd has expired")
                    self.id = 0
                await self.acquire()
            except EtcdError as error:
                log.warning("can't renew the lease of this controller: %s", error)
            await pause(self._clock, RENEW_MS)

    async def acquire(self) -> None:
        """Get a lease if there is none. Raises EtcdError."""
        if not self.id:
            asked_ms = self._clock.monotonic_ms()
            self.id = await self._granted()
            self._renewed_ms = asked_ms

    async def close(self) -> None:
        """End the lease, if etcd answers."""
        lease, self.id = self.id, 0
        if lease:
            try:
                await self._client.call("/v3/lease/revoke", {"ID": str(lease)}, PutAnswer)
            except EtcdError as error:
                log.info("this controller stays listed in etcd for %d s: %s", TTL_S, error)

    async def _granted(self) -> int:
        lease = random_number()
        message = {"ID": str(lease), "TTL": str(TTL_S)}
        try:
            await self._client.call("/v3/lease/grant", message, LeaseAnswer)
        except EtcdRefused as error:
            # It exists already: the answer to the first attempt was lost.
            if error.grpc_code != FAILED_PRECONDITION:
                raise
        return lease

    async def _renewed(self) -> bool:
        """Renew the lease; False if there is none any more."""
        body, asked_ms = b'{"ID":"%d"}' % self.id, self._clock.monotonic_ms()
        line = await self._client.exchange(
            "/v3/lease/keepalive", body, lambda answer: parse(answer, KeepAliveLine)
        )
        renewed = line.result is not None and line.result.ttl_s > 0
        if renewed:
            self._renewed_ms = asked_ms
        return renewed
