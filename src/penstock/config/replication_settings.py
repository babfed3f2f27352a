"""The settings of replication between a master and its slaves."""

from typing import Annotated

from penstock.config.doc import I32_MAX, PORT_MAX, Checked, Doc

ROLES = ("async_master", "sync_master", "slave")
SYNC_COPIES = 2
"""The copies that a sync_master requires unless `in_sync_replicas` says otherwise."""

_KIB = 1024
_MIB = 1024 * _KIB


def check_address(text: str) -> None:
    """host:port; may be empty."""
    host, colon, port = text.rpartition(":")
    one = host and colon and ";" not in host
    if text and not (one and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError("must be host:port")


def check_addresses(text: str) -> None:
    """host:port;…; may be empty."""
    for address in filter(None, text.split(";")):
        try:
            check_address(address.strip())
        except ValueError:
            raise ValueError("must be a list of host:port, separated by ;") from None


class ReplicationConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """Replication of a broker: its role, its HA port, and what a send waits for."""

    role: Annotated[
        str, Doc("The role of the broker. async_master: a send is acknowledged before slaves have "
                 "the message. sync_master: it waits for `in_sync_replicas`. slave: the broker "
                 "copies the log of its master.", "brokerRole", choices=ROLES, form="in capitals")
    ] = "async_master"  # fmt: skip
    protocol: Annotated[
        str, Doc("The protocol of the HA port, the same on the master and its slaves: static "
                 "(RocketMQ's DefaultHAService) or epochs (RocketMQ's AutoSwitchHAService, which "
                 "repairs logs that differ). With RocketMQ's broker.conf, the default is static.",
                 choices=("static", "epochs"))
    ] = "epochs"  # fmt: skip
    host: Annotated[str, Doc("The address that the HA port listens on. Empty: `broker.host`.")] = ""
    port: Annotated[
        int, Doc("The HA port, which slaves connect to. 0: off; -1: `broker.port` + 1.",
                 "haListenPort", least=-1, most=PORT_MAX, form="0 for -1")
    ] = -1  # fmt: skip
    announce: Annotated[
        str, Doc("The address at which slaves reach the HA port. Empty: that of the broker.",
                 "brokerIP2")
    ] = ""  # fmt: skip
    master: Annotated[
        str, Doc("Slave: the HA port of the master, as host:port. Empty: the NameServers name it.",
                 "haMasterAddress", check=check_address)
    ] = ""  # fmt: skip
    in_sync_replicas: Annotated[
        int, Doc("sync_master: how many copies of a message, including the master's, must exist "
                 "before a send is acknowledged. 0 means 2. RocketMQ's default is 1, with which "
                 "its SYNC_MASTER waits for no slave.", "inSyncReplicas", live=True)
    ] = 0  # fmt: skip
    min_in_sync_replicas: Annotated[
        int, Doc("Sends are refused while fewer replicas than this, including the master, are in "
                 "sync. Consumers of a sync_master see nothing new during that time. 0 means 1, "
                 "and 2 with `controllers`.", "minInSyncReplicas", live=True)
    ] = 0  # fmt: skip
    all_in_sync_acknowledge: Annotated[
        bool, Doc("A send waits for all replicas that are in sync, instead of `in_sync_replicas`.",
                  "allAckInSyncStateSet", live=True)
    ] = False  # fmt: skip
    slave_timeout_ms: Annotated[
        int, Doc("How long a send waits for slaves before the response is FLUSH_SLAVE_TIMEOUT.",
                 "slaveTimeout", live=True, least=1)
    ] = 3_000  # fmt: skip
    report_ms: Annotated[
        int, Doc("How often a slave reports its offset, and a master sends a heartbeat, when there "
                 "is nothing else to send.", "haSendHeartbeatInterval", least=1, most=5_000)
    ] = 5_000  # fmt: skip
    idle_ms: Annotated[
        int, Doc("A connection of the HA port on which nothing arrives for this long is closed.",
                 "haHousekeepingInterval", least=1)
    ] = 20_000  # fmt: skip
    frame_bytes_max: Annotated[
        int, Doc("The maximum size of the log range in one frame to a slave.",
                 "haTransferBatchSize", least=_KIB, most=2 * _MIB)
    ] = _MIB  # fmt: skip
    rate_bytes_max: Annotated[
        int, Doc("The maximum number of bytes per second to each slave. 0: no limit.",
                 "maxHaTransferByteInSecond", live=True,
                 form="only with `haFlowControlEnable=true`")
    ] = 0  # fmt: skip
    lag_bytes_max: Annotated[
        int, Doc("A slave that is further behind than this does not join the in-sync set. One "
                 "that is already in the set stays in it; see `lag_ms_max`.", "haMaxGapNotInSync",
                 least=1)
    ] = 256 * _MIB  # fmt: skip
    lag_ms_max: Annotated[
        int, Doc("A slave that has not caught up with the master for this long is not in sync.",
                 "haMaxTimeSlaveNotCatchup", least=1)
    ] = 15_000  # fmt: skip
    from_first_segment: Annotated[
        bool, Doc("An empty slave begins with the first segment of the master's log. Otherwise it "
                  "begins with the last one and lacks all older messages.", "syncFromLastFile",
                  form="inverted")
    ] = True  # fmt: skip
    keep_for_slaves: Annotated[
        bool, Doc("Master: retention keeps segments that a connected slave has not received yet, "
                  "unless the disk is fuller than `disk_force_percent`.", live=True)
    ] = True  # fmt: skip
    learner: Annotated[
        bool, Doc("Slave: never counts as in sync, so no send waits for it.", "asyncLearner")
    ] = False
    controllers: Annotated[
        str, Doc("The controllers that elect the master among the replicas of this broker, as "
                 "host:port, separated by `;`. They give the broker its role and its id. Empty: "
                 "`role` and `broker.id` determine them.", "controllerAddr",
                 form="only with `enableControllerMode=true`", check=check_addresses)
    ] = ""  # fmt: skip
    heartbeat_ms: Annotated[
        int, Doc("With `controllers`: how often the broker sends heartbeats to them.",
                 "brokerHeartbeatInterval", live=True, least=10)
    ] = 500  # fmt: skip
    heartbeat_timeout_ms: Annotated[
        int, Doc("With `controllers`: a replica that sends no heartbeat for this long counts as "
                 "dead. A master acknowledges no messages when it has not been confirmed for this "
                 "long.", "controllerHeartBeatTimeoutMills", least=100)
    ] = 3_000  # fmt: skip
    election_priority: Annotated[
        int, Doc("With `controllers`: of several replicas with equal logs, the one with the "
                 "smallest number is elected.", "brokerElectionPriority", live=True, most=I32_MAX)
    ] = I32_MAX  # fmt: skip
    read_from_slaves: Annotated[
        bool, Doc("Slave: serve pulls. Master: tell consumers that are far behind to pull from a "
                  "slave.", "slaveReadEnable", live=True)
    ] = False  # fmt: skip
    memory_percent: Annotated[
        int, Doc("With `read_from_slaves`: a consumer is far behind if the log after its next "
                 "message is larger than this percentage of the machine's memory.",
                 "accessMessageInMemoryMaxRatio", live=True, most=100)
    ] = 40  # fmt: skip
    secret: Annotated[
        str, Doc("A shared secret with which the master and its slaves authenticate each other on "
                 "the HA port. Apache's brokers do not support it. Empty: none.", secret=True)
    ] = ""  # fmt: skip

    def controller_addresses(self) -> list[str]:
        """The controllers."""
        return [address.strip() for address in self.controllers.split(";") if address.strip()]

    def in_sync_least(self) -> int:
        """How many replicas must be in sync, with the default of 0."""
        return self.min_in_sync_replicas or (2 if self.controllers else 1)

    def copies_required(self) -> int:
        """How many copies must exist before a send is acknowledged, with the default of 0."""
        if self.in_sync_replicas:
            return self.in_sync_replicas
        return SYNC_COPIES if self.role == "sync_master" else 1


def replication_contradiction(
    replication: ReplicationConfig, broker_id: int
) -> tuple[str, str] | None:
    """The full name of a setting that contradicts another one, and why; None if there is none."""
    role = replication.role
    if replication.controllers:
        return _contradicts_controllers(replication)
    if role == "slave" and broker_id == 0:
        return "broker.id", "must be greater than 0 for a slave (replication.role), not 0"
    if role != "slave" and broker_id != 0:
        return (
            "broker.id",
            f"must be 0 for a master, not {broker_id}; set replication.role to slave, or remove it",
        )
    copies, least = replication.in_sync_replicas, replication.in_sync_least()
    if role == "async_master" and copies > 1:
        return (
            "replication.in_sync_replicas",
            f"must be at most 1, not {copies}: an async_master acknowledges a send before slaves "
            "have the message; set replication.role to sync_master",
        )
    copies = copies or (
        1 if role == "async_master" else SYNC_COPIES
    )  # a slave may become a sync_master
    if least > copies and not replication.all_in_sync_acknowledge:
        return (
            "replication.min_in_sync_replicas",
            f"must be at most in_sync_replicas ({copies}), not {least}",
        )
    return _idle_contradiction(replication)


def _idle_contradiction(replication: ReplicationConfig) -> tuple[str, str] | None:
    if replication.idle_ms <= replication.report_ms:
        return (
            "replication.idle_ms",
            f"must be greater than report_ms ({replication.report_ms}), not {replication.idle_ms}",
        )
    return None


def _contradicts_controllers(replication: ReplicationConfig) -> tuple[str, str] | None:
    """With controllers, role and id of the settings do not count."""
    if replication.protocol == "static":
        return (
            "replication.protocol",
            "must be epochs with replication.controllers, not static: without epochs, a master "
            "that was replaced can't be told from its successor",
        )
    if replication.master:
        return (
            "replication.master",
            "must be empty with replication.controllers, which say who is the master",
        )
    if replication.heartbeat_timeout_ms < 2 * replication.heartbeat_ms:
        return (
            "replication.heartbeat_timeout_ms",
            f"must be at least twice heartbeat_ms ({replication.heartbeat_ms}), not "
            f"{replication.heartbeat_timeout_ms}",
        )
    return _idle_contradiction(replication)
