"""The user's configuration directory: `~/.config/penstock`, by the XDG rules.

PENSTOCK_CONFIG_DIR names another directory. Files may contain passwords: the directory has mode
0700, the files 0600. A file is written beside, flushed and renamed, so it is never half a file.
"""

import os
import tempfile
from pathlib import Path

from penstock.user_directories import user_directory

VARIABLE = "PENSTOCK_CONFIG_DIR"


def config_directory() -> Path:
    """The directory; it may not exist yet."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    return user_directory("XDG_CONFIG_HOME", ".config") / "penstock"


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; only this user can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp creates files with mode 0600.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
