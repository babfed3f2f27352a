"""Bodies about users and their rights, and about replication.

The rules of `client_bodies` apply.
"""

from penstock.wire.bodies.client_bodies import Body, BrokerMemberGroup, Int, Long
from penstock.wire.java_numbers import LONG_MAX

# --- users ---------------------------------------------------------------------------------------


class UserInfo(Body):
    """AUTH_…_USER."""

    username: str | None = None
    password: str | None = None
    user_type: str | None = None
    user_status: str | None = None


class PolicyEntryInfo(Body):
    """What a subject may do with one resource."""

    resource: str | None = None
    actions: list[str] | None = None
    source_ips: list[str] | None = None
    decision: str | None = None


class PolicyInfo(Body):
    """The rules of one kind."""

    policy_type: str | None = None
    entries: list[PolicyEntryInfo] | None = None


class AclInfo(Body):
    """AUTH_…_ACL."""

    subject: str | None = None
    policies: list[PolicyInfo] | None = None


# --- replication ---------------------------------------------------------------------------------


class HAConnectionRuntimeInfo(Body):
    """A replica, seen by its master."""

    addr: str | None = None
    slave_ack_offset: Long = 0
    diff: Long = 0
    in_sync: bool = False
    transferred_byte_in_second: Long = 0
    transfer_from_where: Long = 0


class HAClientRuntimeInfo(Body):
    """The master, seen by a replica."""

    master_addr: str | None = None
    transferred_byte_in_second: Long = 0
    max_offset: Long = 0
    last_read_timestamp: Long = 0
    last_write_timestamp: Long = 0
    master_flush_offset: Long = 0


class HARuntimeInfo(Body):
    """GET_BROKER_HA_STATUS."""

    master: bool = False
    master_commit_log_max_offset: Long = 0
    in_sync_slave_nums: Int = 0
    ha_connection_info: list[HAConnectionRuntimeInfo] = []
    ha_client_runtime_info: HAClientRuntimeInfo = HAClientRuntimeInfo()


class EpochEntry(Body):
    """The part of the log that one master wrote; the last one has no end yet."""

    epoch: Int = 0
    start_offset: Long = 0
    end_offset: Long = LONG_MAX


class EpochEntryCache(Body):
    """GET_BROKER_EPOCH_CACHE."""

    cluster_name: str | None = None
    broker_name: str | None = None
    broker_id: Long = 0
    epoch_list: list[EpochEntry] = []
    max_offset: Long = 0


class ReplicaIdentity(Body):
    """A replica of a broker."""

    broker_name: str | None = None
    broker_id: Long = 0
    broker_address: str | None = None
    alive: bool = False


class ReplicasInfo(Body):
    """The replicas of a broker."""

    master_broker_id: Long = 0
    master_address: str | None = None
    master_epoch: Int = 0
    sync_state_set_epoch: Int = 0
    in_sync_replicas: list[ReplicaIdentity] = []
    not_in_sync_replicas: list[ReplicaIdentity] = []


class BrokerReplicasInfo(Body):
    """CONTROLLER_GET_SYNC_STATE_DATA, by the name of the broker."""

    replicas_info_table: dict[str, ReplicasInfo] = {}


class ElectionInfo(Body):
    """An election of a Penstock controller."""

    epoch: Int = 0
    master_broker_id: Long = -1
    time_ms: Long = 0
    reason: str = ""


class ReplicasInfoWithHistory(ReplicasInfo):
    """The replicas of a broker, as a Penstock controller knows them. Java ignores the addition."""

    election_history: list[ElectionInfo] = []
    """The newest at the end."""


class BrokerReplicasInfoWithHistory(Body):
    """CONTROLLER_GET_SYNC_STATE_DATA, as a Penstock controller answers it."""

    replicas_info_table: dict[str, ReplicasInfoWithHistory] = {}


class SyncStateSet(Body):
    """The in-sync set of a broker, by the ids of the controller."""

    sync_state_set: list[Long] = []
    sync_state_set_epoch: Int = 0


class ElectMasterResponseBody(Body):
    """CONTROLLER_ELECT_MASTER."""

    broker_member_group: BrokerMemberGroup | None = None
    sync_state_set: list[Long] = []
