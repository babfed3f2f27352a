"""Joins a broker to its set: controllers give it an id, and learn its address."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import pause
from penstock.errors import ControllerUnreachable, Refused
from penstock.replication.broker_identity import (
    TEMPORARY,
    BrokerIdentity,
    forget_application,
    load_identity,
    save_identity,
)
from penstock.replication.controlled_role import SetState
from penstock.replication.epoch_file import EPOCH_FILE
from penstock.server.background import in_pool
from penstock.server.replication.controller_answers import read_state
from penstock.server.replication.controllers import Controllers
from penstock.transport.peer import Response
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.config import LiveSettings
    from penstock.store.disk import Disk

log = logging.getLogger(__name__)

JOIN_RETRY_MS = 500
WARN_MS = 10_000
"""How often a broker that waits for its controllers says so."""


class Membership:
    """The place of one broker in its set."""

    def __init__(
        self,
        settings: LiveSettings,
        controllers: Controllers,
        disk: Disk,
        root: Path,
        address: str,
        clock: Clock,
    ) -> None:
        """`address` is announced to controllers and other replicas."""
        self._settings = settings
        self._controllers = controllers
        self._disk = disk
        self._root = root
        self._address = address
        self._clock = clock
        self.replica_id = 0
        """0 before `join`."""

    async def join(self) -> SetState:
        """Get an id and register; returns what the set is. Waits until a controller answers."""
        warned_ms = -WARN_MS
        while True:
            try:
                await self._identify()
                return await self.register()
            except (ControllerUnreachable, Refused) as error:
                now_ms = self._clock.monotonic_ms()
                if now_ms - warned_ms >= WARN_MS:
                    warned_ms = now_ms
                    log.warning("waiting for the controllers: %s", error)
            # Replicas that apply for the same id at the same time should not do it again.
            await pause(self._clock, random.randint(JOIN_RETRY_MS // 2, JOIN_RETRY_MS))

    async def _identify(self) -> None:
        broker = self._settings.current.broker
        found = await in_pool(self._disk, lambda: load_identity(self._disk, self._root))
        if found is None:
            found = await self._apply()
        found.check(broker.cluster, broker.name)
        self.replica_id = found.replica_id

    async def _apply(self) -> BrokerIdentity:
        """Apply for an id; once more for the same one if an application was interrupted."""
        disk, root = self._disk, self._root
        wanted = await in_pool(disk, lambda: load_identity(disk, root, TEMPORARY))
        names = self.names()
        if wanted is None or not wanted.check_code:
            answer = await self._ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, names)
            number = parse_long(answer.ext.get("nextBrokerId", "")) or 0
            code = f"{self._address};{self._clock.now_ms()}"
            wanted = BrokerIdentity(names["clusterName"], names["brokerName"], number, code)
            await in_pool(disk, lambda: save_identity(disk, root, wanted))
        wanted.check(names["clusterName"], names["brokerName"])
        fields = {
            **names,
            "appliedBrokerId": str(wanted.replica_id),
            "registerCheckCode": wanted.check_code,
        }
        response = await self._controllers.call(RequestCode.CONTROLLER_APPLY_BROKER_ID, fields)
        if response.code != ResponseCode.SUCCESS:
            # Another replica has got this id.
            await in_pool(disk, lambda: forget_application(disk, root))
            raise Refused(f"the id {wanted.replica_id} was not given: {response.remark}")
        given = wanted._replace(check_code="")
        # The epochs of a broker without controllers have other numbers than theirs. Without them, a
        # log that others do not have is refused, and not truncated.
        await in_pool(disk, lambda: disk.forget(root / EPOCH_FILE))
        await in_pool(disk, lambda: save_identity(disk, root, given))
        log.info("this broker is replica %d of %s", given.replica_id, given.name)
        return given

    async def register(self) -> SetState:
        """Tell the controllers the address; returns what the set is."""
        fields = {
            **self.names(),
            "brokerId": str(self.replica_id),
            "brokerAddress": self._address,
            "invokeTime": str(self._clock.now_ms()),
        }
        return read_state(await self._ask(RequestCode.CONTROLLER_REGISTER_BROKER, fields))

    async def _ask(self, code: int, fields: dict[str, str]) -> Response:
        """The response of the controllers; raises Refused if they refuse."""
        response = await self._controllers.call(code, fields)
        if response.code != ResponseCode.SUCCESS:
            raise Refused(f"the controllers refuse: {response.remark} (code {response.code})")
        return response

    def names(self) -> dict[str, str]:
        """The fields that name the set."""
        broker = self._settings.current.broker
        return {"clusterName": broker.cluster, "brokerName": broker.name}
