"""The directories of a user, by the XDG rules."""

import os
from pathlib import Path


def user_directory(variable: str, default: str) -> Path:
    """The directory that an XDG variable names, or this one below the home directory.

    A relative path in the variable is ignored, as the XDG rules say. A user without a home
    directory, as in a container with any user id, has `/`: container runtimes set HOME to it too.
    """
    given = os.environ.get(variable, "")
    if os.path.isabs(given):
        return Path(given)
    try:
        return Path.home() / default
    except RuntimeError:
        return Path("/") / default
