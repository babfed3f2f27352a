"""Plans that restore the offsets of a group, one file each in the user's configuration directory.

A plan is stored before the offsets change and replaced after, because the offsets may have changed
since the plan was made. The newest 100 are kept.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.cli.contexts.config_directory import config_directory, write_private
from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import ResetPlan

PLANS_MAX = 100


class StoredOffset(msgspec.Struct, frozen=True):
    """The offset to restore in a queue."""

    broker: str
    queue: int
    offset: int


class UndoPlan(msgspec.Struct, frozen=True):
    """The offsets that a group had, and the cluster that they belong to."""

    name: str
    saved_ms: int
    group: str
    topic: str
    nameservers: list[str]
    namespace: str
    offsets: list[StoredOffset]

    def targets(self) -> dict[MessageQueue, int]:
        """The offsets by queue."""
        return {MessageQueue(self.topic, at.broker, at.queue): at.offset for at in self.offsets}


def undo_directory() -> Path:
    """The directory of the plans; it may not exist yet."""
    return config_directory() / "undo"


def save_undo(
    undo: "ResetPlan", nameservers: tuple[str, ...], namespace: str, now_ms: int, name: str = ""
) -> str | None:
    """Store a plan, or replace that with the name; returns its name, None if it is empty."""
    offsets = [
        StoredOffset(move.queue.broker_name, move.queue.queue_id, move.new) for move in undo.moves
    ]
    if not offsets:
        return None
    # UTC, so that the newest plan has the last name also when clocks change for summer time.
    time = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    chosen = name or f"{time}-{''.join(c if c.isalnum() else '_' for c in undo.group[:60])}"
    plan = UndoPlan(chosen, now_ms, undo.group, undo.topic, list(nameservers), namespace, offsets)
    write_private(undo_directory() / f"{chosen}.json", msgspec.json.encode(plan).decode())
    for old in _files()[PLANS_MAX:]:
        old.unlink(missing_ok=True)
    return chosen


def read_undos() -> list[UndoPlan]:
    """All plans, the newest first."""
    return [_read(path) for path in _files()]


def find_undo(name: str | None) -> UndoPlan:
    """The plan with a name, or the newest; raises BadSetting."""
    files = _files()
    found = next((path for path in files if name in (None, path.stem)), None)
    if found is None:
        raise BadSetting(
            f"there is no plan {name!r} in {undo_directory()}" if name else
            f"there is no plan to undo in {undo_directory()}",
            hint="penstock group undo --list shows the plans",
        )  # fmt: skip
    return _read(found)


def remove_undo(name: str) -> None:
    """Delete a plan."""
    (undo_directory() / f"{name}.json").unlink(missing_ok=True)


def _files() -> list[Path]:
    """Their names begin with the time."""
    return sorted(undo_directory().glob("[0-9]*.json"), reverse=True)


def _read(path: Path) -> UndoPlan:
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=UndoPlan)
        return msgspec.structs.replace(plan, name=path.stem)
    except msgspec.MsgspecError as error:
        raise BadSetting(
            f"{path} is not a valid undo plan: {error}", hint="delete the file"
        ) from None
