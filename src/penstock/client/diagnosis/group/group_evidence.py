"""What is known about a consumer group, before anything is concluded from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.client.admin.async_admin import (
    GroupMembers,
    GroupProgress,
    GroupSettings,
    QueueProgress,
)
from penstock.client.diagnosis.message_evidence import (
    Known,
    MembershipEvidence,
    MemberState,
    QueueStateOfMember,
    Unknown,
)
from penstock.plurals import count_text
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import RETRY_TOPIC_PREFIX


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letter topic of a group."""

    count: int
    newest_ms: int | None


@dataclass(frozen=True, slots=True)
class WaitingRetries:
    """Messages of a group in a delay topic: they reach its retry topic when their delay is over."""

    count: int
    is_partial: bool
    """Whether there may be more."""

    @property
    def text(self) -> str | None:
        """A sentence without its end; None if there are none."""
        if not self.count:
            rest = "not all messages that wait for the delay before redelivery were counted"
            return rest if self.is_partial else None
        least = "at least " if self.is_partial else ""
        waits = "waits" if self.count == 1 else "wait"
        return f"{least}{count_text(self.count, 'message')} {waits} for the delay before redelivery"


@dataclass(frozen=True, slots=True)
class GroupEvidence(MembershipEvidence):
    """All that was gathered about a group."""

    group: str
    now_ms: int
    settings: Known[Mapping[str, GroupSettings]]
    """By broker; empty: no broker has the group."""
    members: Known[GroupMembers]
    states: tuple[MemberState, ...]
    progress: Known[GroupProgress]
    dead: Known[DeadLetters]
    read_queues: Mapping[str, tuple[MessageQueue, ...] | None] = field(default_factory=dict)
    """The readable queues of each subscribed topic; None: there is no route."""
    forbidden: tuple[str, ...] = ()
    """Topics that the group is forbidden to read, as `topic on broker`."""
    ends: Mapping[MessageQueue, int] = field(default_factory=dict)
    """The end of each queue; only for broadcast groups."""
    partial: tuple[str, ...] = ()
    waiting_retries: Known[WaitingRetries] = WaitingRetries(0, is_partial=False)
    similar: str = ""
    """Groups with similar names, as text, if no broker has the group."""

    @property
    def pops(self) -> bool:
        """Whether the group consumes with POP."""
        pops = not isinstance(self.members, Unknown) and self.members.consume_type == "CONSUME_POP"
        return pops or any(q.info is None for state in self.states for q in state.queues.values())

    @property
    def queues(self) -> tuple[QueueProgress, ...]:
        """The progress in each queue, without retry topics."""
        if isinstance(self.progress, Unknown):
            return ()
        return tuple(
            q for q in self.progress.queues if not q.queue.topic.startswith(RETRY_TOPIC_PREFIX)
        )

    @property
    def retry_queues(self) -> tuple[QueueProgress, ...]:
        """The progress in the queues of retry topics."""
        if isinstance(self.progress, Unknown):
            return ()
        return tuple(
            q for q in self.progress.queues if q.queue.topic.startswith(RETRY_TOPIC_PREFIX)
        )

    @property
    def never_committed(self) -> tuple[MessageQueue, ...]:
        """Queues with messages in which the group never committed an offset."""
        return tuple(q.queue for q in self.queues if q.committed is None and q.max_offset > 0)

    @property
    def without_owner(self) -> Known[tuple[MessageQueue, ...]]:
        """The readable queues that no member has; Unknown if a member does not answer."""
        silent = [state for state in self.states if state.problem is not None]
        if silent:
            return Unknown(f"{silent[0].client_id} does not tell its queues: {silent[0].problem}")
        owned = {queue for state in self.states for queue in state.queues}
        wanted = [queue for queues in self.read_queues.values() for queue in queues or ()]
        return tuple(queue for queue in wanted if queue not in owned)

    @property
    def differing(self) -> Mapping[str, Mapping[str, str | None]]:
        """Topics to which members subscribe differently: topic → client id → expression."""
        answered = [state for state in self.states if state.problem is None]
        topics = sorted({s.topic for state in answered for s in state.subscriptions})
        found = {}
        for topic in topics:
            mine = {
                state.client_id: None if one is None else one.expression
                for state in answered
                for one in (state.subscription(topic),)
            }
            if len(set(mine.values())) > 1 and not topic.startswith(RETRY_TOPIC_PREFIX):
                found[topic] = mine
        return found

    @property
    def held_queues(self) -> list[tuple[MemberState, MessageQueue, QueueStateOfMember]]:
        """All queues of all members."""
        return [
            (state, queue, held) for state in self.states for queue, held in state.queues.items()
        ]
