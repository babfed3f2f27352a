"""Run-time information of a broker, for tools."""

from penstock.broker.admin.process_memory import mapped_files_max, memory_bytes, open_files_max
from penstock.broker.context import BrokerContext
from penstock.broker.delay.timers import Timers
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool, reply_with
from penstock.rpc.router import Row
from penstock.store.store import MessageStore
from penstock.version import VERSION
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode

PROTOCOL = "V5_4_0"
"""The RocketMQ version whose protocol the broker speaks, as tools print it."""

# RocketMQ's thread pools and their queues, which are always empty here. The capacities are
# RocketMQ's, because tools divide by them.
_CAPACITIES = {
    "send": 10_000,
    "pull": 100_000,
    "litePull": 100_000,
    "query": 20_000,
    "ack": 100_000,
}
_UNUSED = {
    "EndTransactionQueueSize": "0",
    "EndTransactionThreadPoolQueueCapacity": "100000",
    "dispatchBehindBytes": "0",  # queue entries are written in the same call as the message
    "dispatchMaxBuffer": "0",
    "pageCacheLockTimeMills": "0",
    "remainTransientStoreBufferNumbs": "2147483647",
    "startAcceptSendRequestTimeStamp": "0",
    # Single puts are not timed: reading the clock would cost more than the put.
    "getMessageEntireTimeMax": "0",
    "putLatency99": "0.00",
    "putLatency999": "0.00",
    "putMessageDistributeTime": "null",
    "putMessageEntireTimeMax": "0",
}
"""Values for parts that Penstock does not have, by RocketMQ's names."""


class RuntimeHandlers:
    """GET_BROKER_RUNTIME_INFO, GET_TIMER_…."""

    def __init__(self, context: BrokerContext, timers: Timers | None) -> None:
        """Without `timers` it is a slave, which serves no requests for the timer."""
        self._context = context
        self._timers = timers

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.GET_BROKER_RUNTIME_INFO, self.runtime_info),
            Row(RequestCode.GET_TIMER_CHECK_POINT, self.timer_checkpoint),
            Row(RequestCode.GET_TIMER_METRICS, self.timer_metrics),
        ]

    def runtime_info(self, command: Command) -> Answer:
        """All values that tools print, as strings by name."""
        context = self._context
        store = context.store
        table = {
            **_UNUSED,
            **_thread_pool_info(),
            **context.stats.runtime(),
            **_delay_info(context),
            **({} if self._timers is None else self._timers.runtime(command.now_ms)),
            "bootTimestamp": str(context.started_ms),
            "brokerActive": "true" if self._timers is not None else "false",
            "brokerVersionDesc": PROTOCOL,
            "commitLogMaxOffset": str(store.log.end),
            "commitLogMinOffset": str(store.log.begin()),
            "penstockVersion": VERSION,
            **_replication_info(context),
            "remainHowManyDataToFlush": human_bytes(store.log.end - store.flusher.flushed()),
            "runtime": human_duration(command.now_ms - context.started_ms),
        }
        confirm_offset = store.confirm_offset
        return reply_from_pool(
            lambda: KVTable(
                table=dict(sorted({**table, **_disk_info(store, confirm_offset)}.items()))
            )
        )

    def timer_checkpoint(self, command: Command) -> Answer:
        """The checkpoint of the timer."""
        assert self._timers is not None
        return Reply(body=self._timers.checkpoint().pack())

    def timer_metrics(self, command: Command) -> Answer:
        """Waiting timer messages by topic."""
        assert self._timers is not None
        return reply_with(self._timers.metrics.wrapper())


def human_bytes(count: int) -> str:
    """A size as RocketMQ's tools print it: 1024 is 1.0 KiB."""
    if count < 1024:
        return f"{count} B"
    exponent = (count.bit_length() - 1) // 10
    return f"{count / (1 << 10 * exponent):.1f} {'KMGTPE'[exponent - 1]}iB"


def human_duration(ms: int) -> str:
    """A duration as RocketMQ's tools print it."""
    minutes, seconds = divmod(max(ms, 0) // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def _thread_pool_info() -> dict[str, str]:
    info = {}
    for name, capacity in _CAPACITIES.items():
        info[f"{name}ThreadPoolQueueSize"] = "0"
        info[f"{name}ThreadPoolQueueCapacity"] = str(capacity)
        info[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
    return info


def _delay_info(context: BrokerContext) -> dict[str, str]:
    return {
        f"scheduleMessageOffset_{level}": f"{offset},{end}"
        for level, offset, end in context.delay.progress()
    }


def _replication_info(context: BrokerContext) -> dict[str, str]:
    """What RocketMQ's tools do not know, for `penstock cluster status` and other replicas."""
    state, broker = context.role.replication(), context.settings.current.broker
    info = {
        "penstockRole": state.role,
        "penstockClusterName": broker.cluster,
        "penstockBrokerName": broker.name,
        "penstockBrokerId": str(broker.id),
        "penstockEpoch": str(state.epoch or 0),
    }
    if controllers := context.settings.current.replication.controllers:
        info["penstockControllers"] = controllers
    if state.epochs is not None:  # only then slaves have broker ids
        in_sync = [slave.name for slave in state.slaves if slave.in_sync]
        info["penstockInSyncSlaves"] = ",".join(in_sync)
    if state.master is not None:
        info["penstockMasterConnected"] = "true" if state.master.connected else "false"
        info["penstockReplicationError"] = state.master.error
    return info


def _limits() -> dict[str, str]:
    """The limits of this process, for `penstock doctor`; those that exist."""
    limits = {
        "penstockOpenFilesMax": open_files_max(),
        "penstockMappedFilesMax": mapped_files_max(),
    }
    return {name: str(limit) for name, limit in limits.items() if limit is not None}


def _disk_info(store: MessageStore, confirm_offset: int) -> dict[str, str]:
    """Values that need the disk or other files; may wait for them."""
    disk, paths = store.disk, store.paths
    root, log = disk.space(paths.root), disk.space(paths.log)
    begin = store.log.begin()
    earliest_ms = store.lookup.store_ms(begin) if begin < confirm_offset else -1
    memory = memory_bytes("RssAnon")
    total, free = human_bytes(root.used + root.free), human_bytes(root.free)
    return {
        "commitLogDirCapacity": f"Total : {total}, Free : {free}.",
        "commitLogDiskRatio": str(log.percent / 100),
        f"commitLogDiskRatio_{paths.log}": str(log.percent / 100),
        "consumeQueueDiskRatio": str(disk.space(paths.queues).percent / 100),
        "earliestMessageTimeStamp": str(earliest_ms),
        **({} if memory is None else {"penstockMemoryBytes": str(memory)}),
        **_limits(),
    }
