"""Who a broker is to its controllers: the file `brokerIdentity`, in RocketMQ's format.

One line, `cluster#broker name#id`. While a broker applies for an id, `brokerIdentity-temp` has the
id and a check code as a fourth part: if the response is lost, or the broker ends, it applies again
with the same check code and gets the same id.
"""

from pathlib import Path
from typing import Final, NamedTuple

from penstock.errors import BadSetting, StoreDamaged
from penstock.store.disk import Disk
from penstock.wire.java_numbers import parse_long

FILE: Final = "brokerIdentity"
TEMPORARY: Final = "brokerIdentity-temp"
_SEPARATOR: Final = "#"
_PARTS: Final = 3


class BrokerIdentity(NamedTuple):
    """The content of one of the files."""

    cluster: str
    name: str
    replica_id: int
    check_code: str = ""

    def encode(self) -> bytes:
        parts = [self.cluster, self.name, str(self.replica_id)]
        return _SEPARATOR.join([*parts, self.check_code] if self.check_code else parts).encode()

    def check(self, cluster: str, name: str) -> None:
        """Refuse the identity of another broker."""
        if (self.cluster, self.name) != (cluster, name):
            raise BadSetting(
                f"the store belongs to the broker {self.name} of the cluster {self.cluster}, not "
                f"to {name} of {cluster} (file {FILE})",
                hint="set broker.name and broker.cluster as before, or use another data directory",
            )


def load_identity(disk: Disk, root: Path, file: str = FILE) -> BrokerIdentity | None:
    """The stored identity; None if there is none. Raises StoreDamaged."""
    # An interrupted `Disk.replace` leaves only the backup.
    data = disk.read(root / file) or disk.read(root / f"{file}.bak")
    if data is None:
        return None
    parts = data.decode("utf-8", "replace").strip().split(_SEPARATOR, _PARTS)
    number = parse_long(parts[2]) if len(parts) >= _PARTS else None
    if number is None:
        raise StoreDamaged(
            f"{root / file} is not the identity of a broker",
            hint="restore it from a backup, or delete it: then the broker gets a new id",
        )
    return BrokerIdentity(parts[0], parts[1], number, parts[3] if len(parts) > _PARTS else "")


def save_identity(disk: Disk, root: Path, identity: BrokerIdentity) -> None:
    """Store the identity that an application has led to, durably, or one that is applied for."""
    temporary = bool(identity.check_code)
    disk.replace(root / (TEMPORARY if temporary else FILE), identity.encode())
    if not temporary:
        forget_application(disk, root)


def forget_application(disk: Disk, root: Path) -> None:
    """The application for an id has ended."""
    disk.forget(root / TEMPORARY)
