"""Opens the store of a broker, and says what is noteworthy about it."""

import logging
import stat
from pathlib import Path

from penstock.config import Settings
from penstock.store.disk import Disk
from penstock.store.store import MessageStore

log = logging.getLogger(__name__)


def open_store(config: Settings, disk: Disk | None, now_ms: int) -> MessageStore:
    """Open the store; waits for the disk."""
    root = Path(config.broker.data)
    store = MessageStore(root, config.store, disk=disk, now_ms=now_ms)
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & stat.S_IRWXO:
        log.warning(
            "other users of this machine may read the data directory %s: its mode is %o; "
            "set it to %o",
            root,
            mode,
            store.disk.directory_mode,
        )
    _log_disk_use(store, root)
    return store


def _log_disk_use(store: MessageStore, root: Path) -> None:
    space = store.disk.space(root)
    log.info(
        "%s: the log holds %s; log and index take %s of the disk, which has %s left (%d %% used)",
        root,
        _mebibytes(store.log.end - store.log.begin()),
        _mebibytes(store.disk_bytes()),
        _mebibytes(space.free),
        space.percent,
    )


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
