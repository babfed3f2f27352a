"""Bodies about a cluster itself: users and their rights, replication, the controller.

The same rules as in `bodies`.
"""

from penstock.wire.bodies.client_bodies import Body, BrokerMemberGroup, Int, Long

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


# --- replication and controller ------------------------------------------------------------------


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
    """From which offset on a master epoch wrote."""

    epoch: Int = 0
    start_offset: Long = 0
    end_offset: Long = 2**63 - 1


class EpochEntryCache(Body):
    """GET_BROKER_EPOCH_CACHE."""

    cluster_name: str | None = None
    broker_name: str | None = None
    broker_id: Long = 0
    epoch_list: list[EpochEntry] = []
    max_offset: Long = 0


class SyncStateSet(Body):
    """CONTROLLER_ALTER_SYNC_STATE_SET: the replicas that are in step."""

    sync_state_set: frozenset[Long] = frozenset()
    sync_state_set_epoch: Int = 0


class ElectMasterResponseBody(Body):
    """CONTROLLER_ELECT_MASTER."""

    broker_member_group: BrokerMemberGroup | None = None
    sync_state_set: frozenset[Long] = frozenset()


class ReplicaIdentity(Body):
    """One replica of a broker name."""

    broker_name: str | None = None
    broker_id: Long | None = None
    broker_address: str | None = None
    alive: bool | None = None


class ReplicasInfo(Body):
    """The replicas of one broker name."""

    master_broker_id: Long | None = None
    master_address: str | None = None
    master_epoch: Int = 0
    sync_state_set_epoch: Int = 0
    in_sync_replicas: list[ReplicaIdentity] = []
    not_in_sync_replicas: list[ReplicaIdentity] = []


class BrokerReplicasInfo(Body):
    """CONTROLLER_GET_SYNC_STATE_DATA, by broker name."""

    replicas_info_table: dict[str, ReplicasInfo] = {}
