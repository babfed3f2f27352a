"""How the replication of a broker is going, as admin requests and metrics show it.

The server fills this in: handlers only read it. What is not known is None.
"""

from dataclasses import dataclass

from penstock.replication.epochs import Epoch


@dataclass(frozen=True, slots=True)
class SlaveState:
    """A slave, seen by its master."""

    name: str
    """The broker id of the slave; its address with the static protocol, which has no ids."""
    address: str
    """The slave's end of the connection; empty if it is not connected."""
    acknowledged: int
    sent: int
    """Log offset up to which the log was sent to it."""
    in_sync: bool
    acknowledges_flushed: bool
    """Whether it acknowledges what is on its disk, not only what has arrived."""
    bytes_per_second: int
    behind_ms: int = 0
    """For how long it has not had all of the master's log."""


@dataclass(frozen=True, slots=True)
class MasterState:
    """The master, seen by its slave."""

    address: str
    """The HA address of the master; empty if it is not known."""
    connected: bool
    log_end: int | None
    error: str
    """Why the log can't be received; empty if it can."""
    behind_ms: int
    """For how long the slave has not had all of its master's log."""
    received_bytes: int
    bytes_per_second: int
    read_ms: int
    """When the slave last heard from its master; 0: never."""
    written_ms: int
    """When the slave last reported to its master; 0: never."""


@dataclass(frozen=True, slots=True)
class ReplicationState:
    """The replication of a broker."""

    role: str
    """One of the values of `replication.role`."""
    epochs: tuple[Epoch, ...] | None = None
    """The epochs of the log, the oldest first; None with the static protocol."""
    slaves: tuple[SlaveState, ...] = ()
    master: MasterState | None = None
    """Of a slave."""
    deleted_bytes: int = 0
    """Bytes of a master's log that retention has deleted before a connected slave had them."""

    @property
    def epoch(self) -> int | None:
        """The number of the last epoch."""
        return self.epochs[-1].number if self.epochs else None


def no_replication() -> ReplicationState:
    """The state of a broker whose server does not replicate."""
    return ReplicationState("async_master")
