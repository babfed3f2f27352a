"""`AsyncAdmin`: inspect and change a RocketMQ or Penstock cluster.

async with AsyncAdmin("localhost:9876") as admin:
    await admin.create_topic("orders", queues=8)
    plan = await admin.plan_reset("billing", "orders", to="first")
    result = await admin.apply_reset(plan)
    await admin.apply_reset(result.undo)
"""

from penstock.client.admin.admin_groups import GroupChanges
from penstock.client.admin.admin_offsets import OffsetAdmin, ResetTo
from penstock.client.admin.admin_values import (
    BrokerAddress,
    BrokerFigures,
    BrokerRuntimeInfo,
    BrokerState,
    ClusterState,
    DirectResult,
    GroupInfo,
    GroupMembers,
    GroupProgress,
    GroupSettings,
    Member,
    MessagePage,
    QueueMove,
    QueueProgress,
    QueueState,
    ResetPlan,
    ResetResult,
    TopicDescription,
    TopicInfo,
    TopicKind,
    TopicSettings,
    Track,
    TrackState,
)
from penstock.client.admin.admin_waiting import (
    OpenTransaction,
    OpenTransactions,
    ScheduledMessage,
    ScheduledMessages,
    WaitingAdmin,
)
from penstock.client.admin.replication.admin_promotion import PromotionAdmin, PromotionPlan
from penstock.client.admin.replication.admin_replication import (
    Election,
    ElectionHistory,
    KnownReplica,
    ReplicaStatus,
)

__all__ = [
    "AsyncAdmin",
    "BrokerAddress",
    "BrokerFigures",
    "BrokerRuntimeInfo",
    "BrokerState",
    "ClusterState",
    "DirectResult",
    "Election",
    "ElectionHistory",
    "GroupChanges",
    "GroupInfo",
    "GroupMembers",
    "GroupProgress",
    "GroupSettings",
    "KnownReplica",
    "Member",
    "MessagePage",
    "OpenTransaction",
    "OpenTransactions",
    "PromotionPlan",
    "QueueMove",
    "QueueProgress",
    "QueueState",
    "ReplicaStatus",
    "ResetPlan",
    "ResetResult",
    "ResetTo",
    "ScheduledMessage",
    "ScheduledMessages",
    "TopicDescription",
    "TopicInfo",
    "TopicKind",
    "TopicSettings",
    "Track",
    "TrackState",
]


class AsyncAdmin(OffsetAdmin, WaitingAdmin, PromotionAdmin):
    """Topics, groups, progress, messages, brokers and NameServers of a cluster.

    Queries skip brokers that can't be reached; the result or the log names them.
    """
