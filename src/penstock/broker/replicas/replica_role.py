"""The role of a broker in its replica set: what a slave serves and what it refuses.

A slave copies the log and the tables of its master. It has no services that write to the log. The
requests in `MASTER_ONLY` would change the log or a table: they are refused with NotMaster, whose
code SYSTEM_BUSY makes RocketMQ's clients retry at another broker. (Java's producer takes
SLAVE_NOT_AVAILABLE for a success.) Where controllers elect the master, those in `FORWARDED` are
sent on to it instead. All other requests are served.

Users and access lists can be changed at a slave too: mqadmin sends such a change to every master
and slave of a cluster, and gives up at the first refusal. If the slave copies the users of its
master, the next copy replaces them.

Pulls are served with `read_from_slaves`. A slave may be behind its master, so it never corrects the
offset of a consumer: an offset that its queue does not hold is not an error. While the master can
be reached, a consumer for which there is nothing is sent there. While it can't, the pull is
suspended as at a master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from penstock.broker.replicas.replication_state import ReplicationState, no_replication
from penstock.config import LiveSettings
from penstock.errors import NotMaster, Refused
from penstock.replication.controlled_role import SetState
from penstock.rpc.answers import (
    Answer,
    CloseConnection,
    EffectQueue,
    InThread,
    Reply,
    ServerWork,
    Suspend,
    WhenDone,
)
from penstock.rpc.command import Command
from penstock.rpc.router import Handler, InPlaceHandler, InPlaceRow, Row
from penstock.store.store import MessageStore
from penstock.wire.codes import MASTER_ID, PULL_SUSPEND, RequestCode, ResponseCode
from penstock.wire.frame import Request
from penstock.wire.output import Output

MASTER_CHANGES: Final = frozenset(
    {
        # messages
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.RECALL_MESSAGE,
        RequestCode.END_TRANSACTION,
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        # POP
        RequestCode.POP_MESSAGE,
        RequestCode.ACK_MESSAGE,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
        RequestCode.PEEK_MESSAGE,
        RequestCode.NOTIFICATION,
        RequestCode.POLLING_INFO,
        # topics, groups, offsets
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
        RequestCode.SET_MESSAGE_REQUEST_MODE,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.CLONE_GROUP_OFFSET,
    }
)
"""Requests that change the log or a table, which only a master does."""
MASTER_ONLY: Final = MASTER_CHANGES | {
    # states that a slave only copies
    RequestCode.GET_REPLICA_TABLE,
    RequestCode.GET_TIMER_CHECK_POINT,
    RequestCode.GET_TIMER_METRICS,
}
"""Requests that only a master serves."""
FORWARDED: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.RECALL_MESSAGE,
        RequestCode.END_TRANSACTION,
        RequestCode.ACK_MESSAGE,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    }
)
"""Requests of clients that a slave sends on to its master where controllers elect it."""
LOCKS: Final = frozenset({RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})
"""Sent on as well, so that consumers with an outdated route lock the same queues as the others.
Otherwise a slave serves them itself."""
FORWARD_REMARK: Final = "penstock-forwarded"
"""The remark of a forwarded request, which is not forwarded again. A header field would make its
signature invalid."""

PULLS: Final = frozenset({RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE})
REJECTED: Final = "[REJECTREQUEST]system busy, start flow control for a while"
"""The beginning of Apache's answer to a pull that a slave does not serve."""

OffsetKey = tuple[str, str, int]
"""Group, topic and queue id of a consumer offset."""


class RoleStep(StrEnum):
    """The steps of a promotion, in their order; each goes to one kind of replica."""

    STEP_DOWN = "stepDown"
    """Master: stop writing, wait until the slave is prepared, and become a slave with its id."""
    PREPARE = "prepare"
    """The slave that is promoted, asked by the master: have all of the log and the tables."""
    TAKE_OVER = "takeOver"
    """The same slave: become the master, with the id 0."""
    FOLLOW = "follow"
    """Another slave: follow the new master."""


class RoleChange(NamedTuple):
    """Which replica of a broker is to be the master, and what this one has to do for that."""

    step: RoleStep
    master_id: int
    """The id of the slave that is promoted."""
    master_address: str
    """Where it serves clients."""
    epoch: int
    """The epoch that it begins; without epochs, the time of the promotion in seconds."""
    role: str
    """sync_master or async_master."""
    log_end: int = 0
    """PREPARE: where the master's log ends."""


def _no_change(change: RoleChange) -> ServerWork:
    raise Refused("the role of this broker can't be changed while it runs")


class ReplicaRole:
    """Whether a broker is a slave, and what it knows about its master."""

    def __init__(
        self, *, slave: bool = False, master_address: str = "", hides_log: bool = False
    ) -> None:
        self.slave = slave  # does not change: another role is another Broker
        self.hides_log = hides_log
        """Slave: serves no pulls, because no master has confirmed the end of its log yet. Another
        replica may have been elected without it."""
        self.master_address = master_address
        """The address at which the master serves clients, as far as it is known."""
        self.master_online = False
        """Whether the master has answered the last request of this slave."""
        self.commits: dict[OffsetKey, int] = {}
        """Offsets that consumers have committed at this slave and that its master lacks."""
        self.replication: Callable[[], ReplicationState] = no_replication
        """Says how the replication is going. The server replaces it when it replicates."""
        self.change: Callable[[RoleChange], ServerWork] = _no_change
        """Changes the role of this broker. The server replaces it."""
        self.learn: Callable[[SetState], None] | None = None
        """Takes what a controller says of the broker set. The server sets it where controllers
        elect the master."""
        self.forward: Callable[[Command], ServerWork] | None = None
        """Slave: has a request answered by the master; the result is a Reply, or None if the
        response of the master is lost. The server sets it where controllers elect the master:
        clients learn of an election when they ask for the route the next time, which RocketMQ's do
        every 30 s. Until then they send to the old master."""
        self.steps_down = False
        """The role is given to another replica: tables are not changed any more."""
        self.epoch = 0
        """The epoch of a master, or without epochs the time of its promotion; 0 if there was none.
        NameServers prefer the master with the greater one."""
        self.ha_address = ""
        """Where slaves find the log of a master; empty if the HA port is closed."""

    def refusal(self, why: str = "this broker is a slave") -> NotMaster:
        """The answer to a request that only the master serves."""
        if self.master_address:
            return NotMaster(
                f"{why}; its master is {self.master_address}",
                hint=f"send the request to {self.master_address}",
            )
        return NotMaster(f"{why}, and it does not know its master")

    def refuse_if_stepping_down(self) -> None:
        """Raise NotMaster if this master steps down: it does none of MASTER_CHANGES any more."""
        if self.steps_down:
            raise self.refusal("this broker is no longer the master")


def slave_rows(
    role: ReplicaRole,
    settings: LiveSettings,
    store: MessageStore,
    requests: MasterRequests,
    rows: Iterable[Row | InPlaceRow],
) -> Iterator[Row | InPlaceRow]:
    """The rows of a slave: those that only a master serves are left out, pulls are checked."""
    for row in rows:
        if isinstance(row, InPlaceRow) and row.code in PULLS:
            yield InPlaceRow(row.code, SlavePulls(role, settings, store, row.handler))
        elif isinstance(row, Row) and row.code in LOCKS:
            yield Row(row.code, partial(requests.forward_or, row.handler))
        elif row.code not in MASTER_ONLY:
            yield row


class MasterRequests:
    """Requests to a slave that the master should serve: they are refused, or sent on to it."""

    def __init__(self, role: ReplicaRole, effects: EffectQueue) -> None:
        self._role = role
        self._effects = effects

    def rows(self) -> list[Row]:
        refuse = self.refuse
        return [
            Row(code, partial(self.forward_or, refuse) if code in FORWARDED else refuse)
            for code in sorted(MASTER_ONLY)
        ]

    def refuse(self, command: Command) -> Answer:
        raise self._role.refusal()

    def forward_or(self, other: Handler, command: Command) -> Answer:
        """Have the master serve the request, or do something else where that is not possible."""
        forward = self._role.forward
        if forward is None or command.remark == FORWARD_REMARK:
            return other(command)
        return WhenDone(forward(command), lambda reply: self._pass_on(command, reply))

    def _pass_on(self, command: Command, reply: Reply | None) -> Answer:
        """The response of the master. If it is lost, the message may be stored or not: no response
        says that, but clients take the end of the connection for it."""
        if reply is None:
            why = "the response of the master to a forwarded request is lost"
            self._effects.put(CloseConnection(command.client, why))
        return reply


class SlavePulls:
    """Pulls from a slave; `pulls` finds the messages."""

    def __init__(
        self,
        role: ReplicaRole,
        settings: LiveSettings,
        store: MessageStore,
        pulls: InPlaceHandler,
    ) -> None:
        self._role = role
        self._settings = settings
        self._store = store
        self._pulls = pulls

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """As the handler of a master does; NotMaster if slaves are not read from."""
        if not self._settings.current.replication.read_from_slaves:
            raise self._role.refusal(
                f"{REJECTED}: this broker is a slave that serves no pulls "
                "(replication.read_from_slaves)"
            )
        if self._role.hides_log:
            raise self._role.refusal(
                f"{REJECTED}: this slave does not know yet which messages are confirmed"
            )
        answer = self._pulls.handle(request, output, client, now_ms)
        if answer is None:
            return None
        return self._adapt(answer, request.i64(b"queueOffset"), self._waiting(request, now_ms))

    def _waiting(self, request: Request, now_ms: int) -> Callable[[Reply], Answer]:
        """Suspends a request until messages arrive in its queue, and then replies."""
        queue = self._store.queue(request.text(b"topic") or "", request.i32(b"queueId"))
        suspendable = request.i32(b"sysFlag") & PULL_SUSPEND
        wait_ms = request.i64_or(b"suspendTimeoutMillis", 0) if suspendable else 0

        def wait(reply: Reply) -> Answer:
            if queue is None or wait_ms <= 0 or self._role.master_online:
                return reply
            return Suspend(queue, now_ms + wait_ms, lambda last: reply)

        return wait

    def _adapt(self, answer: Answer, offset: int, wait: Callable[[Reply], Answer]) -> Answer:
        """A master's answer to a pull, as a slave gives it."""
        if isinstance(answer, InThread):
            then = answer.then
            return replace(answer, then=lambda found: self._adapt(then(found), offset, wait))
        if isinstance(answer, Suspend):
            if self._role.master_online:
                return self._adapt(answer.retry(True), offset, wait)
            retry = answer.retry
            return replace(answer, retry=lambda last: self._adapt(retry(last), offset, wait))
        if not isinstance(answer, Reply):
            return answer
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            return wait(self._again(answer, {"nextBeginOffset": str(offset)}))
        if answer.code == ResponseCode.PULL_NOT_FOUND and self._role.master_online:
            return self._again(answer, {})
        return answer

    def _again(self, reply: Reply, changed: dict[str, str]) -> Reply:
        """Tell a consumer to pull again, from the master if that can be reached."""
        own_id = self._settings.current.broker.id
        suggested = MASTER_ID if self._role.master_online else own_id
        fields = {**(reply.ext or {}), "suggestWhichBrokerId": str(suggested), **changed}
        return replace(reply, code=ResponseCode.PULL_RETRY_IMMEDIATELY, ext=fields)
