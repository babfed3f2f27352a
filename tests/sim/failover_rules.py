"""The settings of a simulated broker set, and the rules that tests of the simulation break."""

from typing import NamedTuple

from penstock.replication.agreed_replicas import REFUSALS, AgreedReplicas
from penstock.replication.controlled_role import ControlledRole
from penstock.replication.master_session import EpochMasterSession
from penstock.replication.replicas import ReplicaRules
from penstock.replication.slave_session import EpochSlaveSession
from penstock.wire.codes import ResponseCode


class Mode(NamedTuple):
    """The settings of all brokers."""

    name: str
    rules: ReplicaRules
    sync_flush: bool
    frame_bytes_max: int = 150
    unclean: bool = False


class BrokerRules(NamedTuple):
    """The classes under test, and rules of the server's code."""

    replicas: type[AgreedReplicas] = AgreedReplicas
    role: type[ControlledRole] = ControlledRole
    master: type[EpochMasterSession] = EpochMasterSession
    slave: type[EpochSlaveSession] = EpochSlaveSession
    slave_shows_all: bool = False
    """A slave that has started shows its whole log, before its master has confirmed it."""
    retry_tells: bool = False
    """The refusal of a second attempt counts for the first one, whose answer is lost."""
    error_refuses: bool = False
    """An error of a controller counts as a refusal."""
    lost_answer_refuses: bool = False
    """A request that is not answered counts as refused."""
    log_complete: bool = False
    """The log counts as complete also after a power cut."""
    asks_for_next_epoch: bool = False
    """A master that is elected again asks for sets until its services stop."""
    takes_over_unflushed: bool = False
    """A replica takes over before its log is flushed."""
    ignores_failed_disk: bool = False
    """A replica takes over although an fsync has failed, because the next one succeeds."""
    keeps_unflushed: bool = False
    """A log that is opened again counts as flushed, although an fsync has failed."""
    forgets_power_cut: bool = False
    """The second process after a power cut takes its log for complete."""
    gives_back_after_serving: bool = False
    """A master that has served gives the set before its epoch back."""
    serves_again: bool = False
    """A master whose services have failed begins them again in the same epoch."""

    def is_refused(self, code: int | None, failed: int) -> bool:
        """Whether a request that was answered with a code, or not at all, had and will have no
        effect."""
        if code is None:
            return self.lost_answer_refuses
        if code == ResponseCode.SYSTEM_ERROR:
            return self.error_refuses
        return code in REFUSALS and (failed == 0 or self.retry_tells)


class Assigned(NamedTuple):
    """As `AssignedRole`."""

    leads: bool = False
    epoch: int = 0
    address: str = ""
