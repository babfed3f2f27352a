"""Copies the tables of the master to a slave, and commits of consumers at the slave to the master.

A round asks the master for its tables, every ROUND_MS. After a failure the next round follows after
a pause that doubles up to BACK_OFF_MS_MAX. Failures are logged once, until a round succeeds.

1. Topics, groups and request modes are taken over at once.
2. Offsets that consumers have committed at the slave are sent to the master where they are ahead.
   Otherwise the master's offsets count, smaller ones too.
3. Offsets and the progress of the timer are kept aside until the log has arrived
   (`replication.metadata`), and then taken over.
4. Users and access lists are taken over if both brokers have the same shared secret.

An Apache master has no GET_REPLICA_TABLE: users are copied by mqadmin, and open ordered pops are
not copied.
"""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from penstock.broker.admin.replica_tables import ACCESS, ORDERED_POPS
from penstock.broker.auth.sealed_table import new_challenge, unseal
from penstock.broker.broker import Broker
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.broker.takeover.replicated_tables import ReplicatedTables
from penstock.clock import Clock, LoopClock, pause
from penstock.config import LiveSettings
from penstock.errors import BodyError, PenstockError, ReplicationError, refusal
from penstock.replication.metadata import (
    GROUP_PAGES,
    TOPIC_PAGES,
    HeldTables,
    LogEnds,
    TablePages,
    commits_to_send,
    decode_groups,
    decode_offsets,
    decode_topics,
    with_commits,
)
from penstock.server.background import in_pool
from penstock.transport.peer import Peer, Response, Sign
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    DataVersion,
    KVTable,
    SubscriptionGroupConfig,
    TopicConfig,
)
from penstock.wire.bodies.cluster_bodies import HARuntimeInfo
from penstock.wire.bodies.table_bodies import (
    DelayOffsetSerializeWrapper,
    MessageRequestModeSerializeWrapper,
    TimerCheckpoint,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long

log = logging.getLogger(__name__)

ROUND_MS = 3_000
"""Interval of the rounds, as that of RocketMQ's slaves."""
BACK_OFF_MS_MAX = 30_000
CALL_MS = 3_000
TABLE_CALL_MS = 30_000
"""Time limit of a request for a table that may be large."""
ARRIVAL_MS = 1_000
"""How long a round waits for the log; else the tables are taken over in a later round."""
ARRIVAL_POLL_MS = 20
BEGIN_ROUNDS = 20
"""Every so many rounds the begin of the master's log is asked for, for retention."""
STEP_CHANGES = 20
"""Changes of tables before the event loop does something else."""


@dataclass(slots=True)
class SyncState:
    """How the copies of tables are doing."""

    success_ms: int = 0  # time of the last complete round; 0: none yet
    rounds: int = 0
    failures: int = 0  # in a row
    failures_total: int = 0
    error: str = ""  # of the last round
    master_end: int = -1  # the end of the master's log in the last round; -1: it is not known
    held_to: int = 0  # the offsets wait for this end of the log; 0: they do not wait


class MetadataSync:
    """Keeps the tables of a slave equal to those of its master."""

    def __init__(
        self,
        settings: LiveSettings,
        broker: Broker,
        role: ReplicaRole,
        clock: Clock | None = None,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
        *,
        arrived: Callable[[], int] | None = None,
    ) -> None:
        """`arrived` returns the end of the slave's log that is on the disk."""
        assert broker.replicated is not None, "only a slave copies tables"
        self.state = SyncState()
        self._settings = settings
        self._tables: ReplicatedTables = broker.replicated
        self._context = broker.context
        self._role = role
        self._clock = clock or LoopClock()
        self._sign = sign
        self._ssl = ssl
        self._arrived = arrived or self._flushed
        self._peer: Peer | None = None
        self._changed = asyncio.Event()  # the master's address
        self._copying = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._held: HeldTables | None = None
        self._access_version: DataVersion | None = None
        self._access_error = ""
        self._log_ends = LogEnds()

    def start(self) -> None:
        """Begin with the rounds."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the rounds and close the connection."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._disconnect()

    def set_master(self, address: str) -> None:
        """Copy from the master at this address from now on; empty: there is none."""
        if address != self._role.master_address:
            self._role.master_address = address
            self._role.master_online = False
            self.state.master_end = -1
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            address = self._role.master_address
            if not address:
                await self._disconnect()
                await self._changed.wait()
                continue
            if self._peer is None or self._peer.address != address:
                await self._disconnect()
                self._held = None
                self._peer = Peer(address, ssl=self._ssl, sign=self._sign, clock=self._clock)
            await self.round()
            wait_ms = ROUND_MS
            if self.state.failures:
                wait_ms = min(ROUND_MS << min(self.state.failures - 1, 8), BACK_OFF_MS_MAX)
            await self._wait(wait_ms)

    async def _wait(self, wait_ms: int) -> None:
        alarm = self._clock.wake_at(self._clock.now_ms() + wait_ms, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            alarm.cancel()

    async def _disconnect(self) -> None:
        peer, self._peer = self._peer, None
        self._role.master_online = False
        if peer is not None:
            await peer.close()

    async def copy_now(self) -> None:
        """Copy what has changed until now; raises ReplicationError if that fails."""
        # The first round may still take over offsets that were fetched before.
        for _ in range(2):
            await self.round()
        if self.state.failures or self._held is not None:
            raise ReplicationError(
                f"the tables of the master were not copied: {self.state.error or 'its log is late'}"
            )

    async def round(self) -> None:
        """Copy what has changed; never raises a PenstockError."""
        async with self._copying:
            await self._round()

    async def _round(self) -> None:
        address = self._role.master_address
        try:
            await self._copy_tables()
        except PenstockError as error:
            self._failed(address, str(error).removeprefix(f"{address}: "))
        except Exception as error:
            log.exception("copying the tables of the master failed")
            self._failed(address, f"{type(error).__name__}: {error}")
        else:
            self._succeeded(address)

    def _succeeded(self, address: str) -> None:
        state = self.state
        if state.error or not state.success_ms:
            log.info("copied the tables of the master %s", address)
        state.success_ms = self._clock.now_ms()
        state.rounds += 1
        state.failures, state.error = 0, ""
        self._role.master_online = True

    def _failed(self, address: str, error: str) -> None:
        state = self.state
        if error != state.error:
            log.warning("can't copy the tables of the master %s: %s", address, error)
        state.failures += 1
        state.failures_total += 1
        state.error = error
        state.master_end = -1
        self._role.master_online = False

    # --- a round

    async def _copy_tables(self) -> None:
        store = self._context.store
        known_to = store.log.end
        self._log_ends.add(self._clock.monotonic_ms(), store.writer.store_ms, known_to)
        await self._copy_topics()
        await self._copy_groups()
        body = await self._ask_optional(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
        if body:
            self._tables.replace_modes(fastjson.decode(body, MessageRequestModeSerializeWrapper))
        fetched = await self._fetch_offsets() if self._held is None else None
        # Asked for last: the end of the log when all these tables had been read.
        status = await self._ask(RequestCode.GET_BROKER_HA_STATUS)
        master_end = fastjson.decode(status.body, HARuntimeInfo).master_commit_log_max_offset
        self.state.master_end = master_end
        self._tables.topics_known(known_to, master_end)
        await self._in_steps(self._tables.remove_queues(known_to))
        if fetched is not None:
            fetched.log_end = master_end
            self._held = fetched
        assert self._held is not None
        await self._take_held(self._held)
        await self._copy_access()
        if self.state.rounds % BEGIN_ROUNDS == 0:
            await self._ask_begin()

    async def _ask_begin(self) -> None:
        """Ask where the master's log begins; a master that has no message may not know it."""
        body = await self._ask_optional(RequestCode.GET_BROKER_RUNTIME_INFO)
        if body:
            table = fastjson.decode(body, KVTable).table
            begin = parse_long(table.get("commitLogMinOffset", ""))
            if begin is not None and begin >= 0:
                self._tables.master_log_begins(begin)

    async def _copy_topics(self) -> None:
        table = self._context.topics.table
        pages: TablePages[TopicConfig] = TablePages(TOPIC_PAGES, table.version)
        complete = False
        while not complete:
            response = await self._ask(TOPIC_PAGES.code, pages.request(), TABLE_CALL_MS)
            page = await in_pool(self._context.store.disk, partial(decode_topics, response.body))
            complete = pages.take(response.ext or {}, page.topic_config_table, page.data_version)
        if not pages.unchanged:
            assert pages.version is not None
            now_ms = self._clock.now_ms()
            await self._in_steps(self._tables.replace_topics(pages.entries, pages.version, now_ms))

    async def _copy_groups(self) -> None:
        table = self._context.groups.table
        pages: TablePages[SubscriptionGroupConfig] = TablePages(GROUP_PAGES, table.version)
        forbidden: dict[str, dict[str, int]] = {}
        complete = False
        while not complete:
            response = await self._ask(GROUP_PAGES.code, pages.request(), TABLE_CALL_MS)
            page = await in_pool(self._context.store.disk, partial(decode_groups, response.body))
            groups = page.subscription_group_table
            complete = pages.take(response.ext or {}, groups, page.data_version)
            forbidden.update(page.forbidden_table)
        if not pages.unchanged:
            assert pages.version is not None
            now_ms = self._clock.now_ms()
            await self._in_steps(
                self._tables.replace_groups(pages.entries, forbidden, pages.version, now_ms)
            )

    # --- offsets

    async def _fetch_offsets(self) -> HeldTables:
        """The master's offsets, after the commits at this slave."""
        response = await self._ask(RequestCode.GET_ALL_CONSUMER_OFFSET, {}, TABLE_CALL_MS)
        offsets = await in_pool(self._context.store.disk, lambda: decode_offsets(response.body))
        held = HeldTables(offsets)
        await self._send_commits(held)
        body = await self._ask_optional(RequestCode.GET_ALL_DELAY_OFFSET)
        if body:
            held.delay = fastjson.decode(body, DelayOffsetSerializeWrapper)
        body = await self._ask_optional(RequestCode.GET_TIMER_CHECK_POINT)
        if body:
            held.timer = TimerCheckpoint.unpack(body)
        timer_ms = held.timer.last_read_time_ms if held.timer is not None else 0
        held.delivered_from = self._log_ends.before(self._clock.monotonic_ms(), timer_ms)
        body = await self._ask_optional(RequestCode.GET_REPLICA_TABLE, {"table": ORDERED_POPS})
        held.ordered_pops = body or None
        return held

    async def _send_commits(self, held: HeldTables) -> None:
        """Send commits at this slave to the master where they are ahead."""
        commits = self._role.commits
        ahead = commits_to_send(commits, held.offsets)
        for key in [key for key in commits if key not in ahead]:
            del commits[key]  # the master has it, or a newer one
        for key, offset in ahead.items():
            group, topic, queue_id = key
            fields = {
                "consumerGroup": group,
                "topic": topic,
                "queueId": str(queue_id),
                "commitOffset": str(offset),
            }
            response = await self._call(RequestCode.UPDATE_CONSUMER_OFFSET, fields, CALL_MS)
            if response.code == ResponseCode.SUCCESS:
                held.sent[key] = offset
            if commits.get(key) == offset:
                del commits[key]  # sent, or refused because topic or group do not exist there
        self._tables.commits_sent()
        if held.sent:
            log.info("sent %d offsets that consumers committed here to the master", len(held.sent))

    async def _take_held(self, held: HeldTables) -> None:
        """Take over the offsets if the log has arrived, or arrives soon."""
        self.state.held_to = held.log_end
        waited_ms = 0
        while self._arrived() < held.log_end:
            if waited_ms >= ARRIVAL_MS:
                return
            await pause(self._clock, ARRIVAL_POLL_MS)
            waited_ms += ARRIVAL_POLL_MS
        self._held = None
        self.state.held_to = 0
        with_commits(held.offsets, held.sent)
        with_commits(held.offsets, self._role.commits)
        tables = self._tables
        if held.ordered_pops is not None:
            tables.replace_ordered_pops(held.ordered_pops)
        await self._in_steps(tables.replace_offsets(held.offsets, self._clock.now_ms()))
        if held.delay is not None:
            tables.replace_delay_offsets(held.delay)
        if held.timer is not None:
            tables.replace_timer_progress(held.timer)
        tables.delivered_from(held.delivered_from)

    def _flushed(self) -> int:
        store = self._context.store
        flushed = store.flusher.flushed()
        if flushed < store.log.end:
            store.flusher.demand()
        return flushed

    # --- users

    async def _copy_access(self) -> None:
        secret = self._settings.current.replication.secret
        if not secret:
            if self._context.access.enabled():
                self._report_access("replication.secret is not set")
            return
        challenge = new_challenge()
        fields = {"table": ACCESS, "challenge": challenge}
        if self._access_version is not None:
            fields["dataVersion"] = fastjson.encode(self._access_version).decode()
        response = await self._call(RequestCode.GET_REPLICA_TABLE, fields, TABLE_CALL_MS)
        if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return
        if response.code != ResponseCode.SUCCESS:
            self._report_access(response.remark or f"response code {response.code}")
            return
        if not response.body:
            return
        table = self._context.access.table
        try:
            content = await in_pool(
                self._context.store.disk, lambda: unseal(table, response.body, secret, challenge)
            )
        except BodyError as error:
            self._report_access(error.remark())
            return
        if content.data_version != table.version:
            self._tables.replace_access(content, self._clock.now_ms())
        self._access_version, self._access_error = content.data_version, ""

    def _report_access(self, why: str) -> None:
        if why != self._access_error:
            self._access_error = why
            log.warning("the users and access lists of the master are not copied: %s", why)

    # --- requests and steps

    async def _call(self, code: int, fields: dict[str, str], timeout_ms: int) -> Response:
        assert self._peer is not None
        return await self._peer.call(code, fields, timeout_ms=timeout_ms)

    async def _ask(
        self, code: int, fields: dict[str, str] | None = None, timeout_ms: int = CALL_MS
    ) -> Response:
        """The response to a request that every master serves."""
        response = await self._call(code, fields or {}, timeout_ms)
        if response.code != ResponseCode.SUCCESS:
            raise refusal(response.code, response.remark, self._role.master_address)
        return response

    async def _ask_optional(self, code: int, fields: dict[str, str] | None = None) -> bytes:
        """The table that a master may not have; empty if it refuses the request."""
        response = await self._call(code, fields or {}, TABLE_CALL_MS)
        return response.body if response.code == ResponseCode.SUCCESS else b""

    async def _in_steps(self, changes: Iterator[None]) -> None:
        for number, _ in enumerate(changes):
            if number % STEP_CHANGES == STEP_CHANGES - 1:
                await asyncio.sleep(0)
