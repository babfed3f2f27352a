"""The file of a log's epochs on the disk, `epochFileCheckpoint`, with its `.bak` beside it.

A save is durable before it returns. It writes the file twice, so that the `.bak` has the same
content: an older one would lack the last epoch, and its messages would count as those of another
master. After a crash during a save, the old or the new epochs are loaded.
"""

from pathlib import Path
from typing import Final

from penstock.errors import BodyError, StoreDamaged
from penstock.replication.epochs import EpochHistory, decode_epochs
from penstock.store.disk import Disk
from penstock.store.tables.config_tables import ConfigFile

EPOCH_FILE: Final = "epochFileCheckpoint"


def load_epochs(disk: Disk, path: Path) -> EpochHistory:
    """The saved epochs, none if the file does not exist. A damaged file is renamed to `.damaged`
    and the `.bak` used, with a warning in the log; StoreDamaged if that is damaged too."""
    return ConfigFile(disk, path).load(_parse) or EpochHistory()


def save_epochs(disk: Disk, path: Path, history: EpochHistory) -> None:
    """Replace the file and its `.bak`."""
    data = history.encode()
    for _ in range(2):
        disk.replace(path, data)


def _parse(data: bytes) -> EpochHistory:
    try:
        return decode_epochs(data)
    except StoreDamaged as error:
        raise BodyError(error.message) from None
