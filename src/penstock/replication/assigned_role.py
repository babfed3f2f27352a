"""The role that a broker was given while it ran, in the file `config/penstock-role.json`.

It replaces the role and the id of the settings, also after a restart: a master that was replaced
must not come back as one because its settings still say so. An operator who changes these settings
decides again: then the role is removed from the file. The epoch stays, because numbers of epochs
are not used again.
"""

import logging
from pathlib import Path
from typing import Final

import msgspec

from penstock.config import Settings
from penstock.config.settings import with_values
from penstock.store.disk import Disk
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, Long
from penstock.wire.codes import MASTER_ID

log = logging.getLogger(__name__)

FILE: Final = "config/penstock-role.json"


class AssignedRole(Body):
    """Content of the file."""

    role: str = ""
    """One of the values of `replication.role`; empty: none."""
    broker_id: Long = MASTER_ID
    epoch: Long = 0
    """The epoch that the master begins, or that of a slave's master. Without epochs, the time of
    the promotion in seconds."""
    master_address: str = ""
    """Slave: where its master served clients when the role was given."""
    configured_role: str = ""
    """Role and id of the settings at that time."""
    configured_id: Long = MASTER_ID

    def counts_for(self, settings: Settings) -> bool:
        """Whether role and id of the settings are what they were."""
        configured = settings.replication.role, settings.broker.id
        return bool(self.role) and configured == (self.configured_role, self.configured_id)

    def applied_to(self, settings: Settings) -> Settings:
        """The settings with this role and id."""
        return with_values(settings, {"replication.role": self.role, "broker.id": self.broker_id})


def load_assigned_role(disk: Disk, root: Path) -> AssignedRole | None:
    """The saved role in the store at `root`; None if there is none. Raises StoreDamaged."""
    return ConfigFile(disk, root / FILE).load(lambda data: fastjson.decode(data, AssignedRole))


def save_assigned_role(
    disk: Disk, root: Path, assigned: AssignedRole, configured: Settings
) -> None:
    """Save a role that counts as long as the settings have this role and id.

    It is durable when this returns. The file is written twice, so that its `.bak` is no older role.
    Once the first write has succeeded, the role counts, so a failure of the second changes nothing.
    """
    assigned = msgspec.structs.replace(
        assigned,
        configured_role=configured.replication.role,
        configured_id=configured.broker.id,
    )
    data = fastjson.encode_pretty(assigned)
    disk.replace(root / FILE, data)
    try:
        disk.replace(root / FILE, data)
    except OSError as error:
        log.warning("the backup of %s is out of date: %s", root / FILE, error)
