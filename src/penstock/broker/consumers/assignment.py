"""Assignment of queues by the broker: QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE.

A consumer with broker-side rebalance queries the assignment of each topic about every 20 s and
whenever its group changes. The response has its queues, and for each whether to pull or to pop. A
response with an empty list makes the consumer drop its queues; a response without a list means that
nothing is known, and the consumer keeps its queues.

A topic may have queues on several brokers, so the route comes from the NameServers. The last route
is kept for the case that none of them responds, so that consumers keep the queues of other brokers.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeAlias

from penstock.broker.consumers.allocation import (
    STRATEGIES,
    TopicQueues,
    allocate_for_pop,
    allocate_for_pull,
)
from penstock.broker.consumers.client_groups import BROADCASTING
from penstock.broker.consumers.clients import Clients
from penstock.broker.consumers.groups import Groups
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import InvalidParameter, NoPermission, Refused
from penstock.rpc.answers import Answer, InThread, PersistentTable, QueryRoute, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool, reply_with
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Row
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    MessageQueue,
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
    TopicRouteData,
)
from penstock.wire.bodies.table_bodies import MessageRequestModeSerializeWrapper
from penstock.wire.codes import LMQ_PREFIX, PERM_READ, RETRY_TOPIC_PREFIX, RequestCode

PULL: Final = "PULL"
POP: Final = "POP"
CLUSTERING: Final = "CLUSTERING"
ROUTES_MAX: Final = 1_024
"""Maximum number of topics whose last route is kept."""
MODES_MAX: Final = 10_000
"""Maximum number of pairs of topic and group with a mode: each change writes all of them."""


ASSIGNED_MAX: Final = 100_000
"""Maximum number of queues in one assignment: more do not fit into a frame."""

Allocation: TypeAlias = Callable[[], Sequence[MessageQueue] | None]


class RequestModes:
    """The request modes (PULL or POP) that were set, by topic and group."""

    FILE: ClassVar[str] = "config/messageRequestMode.json"

    def __init__(self) -> None:
        self.dirty = False
        self._modes: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}

    def load(self, file: ConfigFile) -> None:
        """Load the file, if it exists."""
        found = file.load(lambda data: fastjson.decode(data, MessageRequestModeSerializeWrapper))
        if found is not None:
            self.replace(found)
            self.dirty = False

    def get(self, topic: str, group: str) -> SetMessageRequestModeRequestBody | None:
        """The mode that was set for a group on a topic."""
        return self._modes.get(topic, {}).get(group)

    def put(self, mode: SetMessageRequestModeRequestBody) -> None:
        """Set the mode of a group on a topic."""
        self._modes.setdefault(mode.topic, {})[mode.consumer_group] = mode
        self.dirty = True

    def replace(self, wrapper: MessageRequestModeSerializeWrapper) -> bool:
        """Take over the modes of another broker; whether they differ."""
        if wrapper.message_request_mode_map == self._modes:
            return False
        self._modes = {
            topic: dict(groups) for topic, groups in wrapper.message_request_mode_map.items()
        }
        self.dirty = True
        return True

    def count(self) -> int:
        """The number of pairs of topic and group that have a mode."""
        return sum(map(len, self._modes.values()))

    def wrapper(self) -> MessageRequestModeSerializeWrapper:
        """The content of the file."""
        return MessageRequestModeSerializeWrapper(message_request_mode_map=self._modes)

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(self.wrapper())


class Assignments:
    """Assigns queues to the members of a group."""

    def __init__(
        self,
        settings: LiveSettings,
        persistence: Persistence,
        clients: Clients,
        groups: Groups,
        topics: Topics,
    ) -> None:
        self._settings = settings
        self._persistence = persistence
        self._clients = clients
        self._groups = groups
        self._topics = topics
        self.modes = RequestModes()
        self.modes.load(self._persistence.file(RequestModes.FILE))
        self._counts: dict[str, dict[str, int]] = {}  # topic → broker → queues, by the last route

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.QUERY_ASSIGNMENT, self.query),
            Row(RequestCode.SET_MESSAGE_REQUEST_MODE, self.set_mode),
            Row(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, self.get_modes),
        ]

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self.modes,)

    def query(self, command: Command) -> Answer:
        """QUERY_ASSIGNMENT: the queues of one client on one topic."""
        request = command.body_as(QueryAssignmentRequestBody)
        if not request.topic or not request.consumer_group or not request.client_id:
            raise InvalidParameter("an assignment needs topic, consumerGroup and clientId")
        if request.message_model not in (CLUSTERING, BROADCASTING):
            raise InvalidParameter(
                f"the message model {request.message_model!r} is not CLUSTERING or BROADCASTING"
            )
        if request.topic.startswith(LMQ_PREFIX) and request.message_model == CLUSTERING:
            own = {self._settings.current.broker.name: 1}
            return self._answer(request, TopicQueues(request.topic, own))
        return QueryRoute(
            request.topic, lambda route: self._answer(request, self._queues(request.topic, route))
        )

    def set_mode(self, command: Command) -> Answer:
        """SET_MESSAGE_REQUEST_MODE; the response is sent when the file is saved."""
        mode = command.body_as(SetMessageRequestModeRequestBody)
        if mode.topic.startswith(RETRY_TOPIC_PREFIX):
            raise NoPermission(
                f"the mode of the retry topic {mode.topic} can't be set: it is always pulled",
                hint="set the mode of the topic itself",
            )
        if mode.mode not in (PULL, POP):
            raise InvalidParameter(f"the mode {mode.mode!r} is neither PULL nor POP")
        self._topics.need(mode.topic)
        self._groups.find(mode.consumer_group, command.now_ms, command.client)
        known = self.modes.get(mode.topic, mode.consumer_group)
        if known is None and self.modes.count() >= MODES_MAX:
            raise InvalidParameter.over(
                "too many request modes",
                figure=MODES_MAX + 1,
                limit=MODES_MAX,
                unit="pairs of topic and group",
                hint="use the setting default_request_mode for most groups",
            )
        self.modes.put(mode)
        return InThread(self._persistence.save(self.modes), lambda _: Reply())

    def get_modes(self, command: Command) -> Answer:
        """GET_ALL_MESSAGE_REQUEST_MODE: all modes that were set."""
        return reply_with(self.modes.wrapper())

    def _answer(self, request: QueryAssignmentRequestBody, queues: TopicQueues | None) -> Answer:
        mode = self._mode(request.topic, request.consumer_group)
        allocate = None if queues is None else self._allocation(request, mode, queues)
        if allocate is None:
            return reply_with(QueryAssignmentResponseBody())

        def work() -> QueryAssignmentResponseBody:
            allocated = allocate()
            if allocated is None:
                return QueryAssignmentResponseBody()
            return QueryAssignmentResponseBody(
                message_queue_assignments=[
                    MessageQueueAssignment(message_queue=queue, mode=mode.mode)
                    for queue in dict.fromkeys(allocated)
                ]
            )

        return reply_from_pool(work)

    def _mode(self, topic: str, group: str) -> SetMessageRequestModeRequestBody:
        configured = self.modes.get(topic, group)
        if configured is not None:
            return configured
        broker = self._settings.current.broker
        retry = topic.startswith(RETRY_TOPIC_PREFIX)
        return SetMessageRequestModeRequestBody(
            topic=topic,
            consumer_group=group,
            mode=PULL if retry else broker.default_request_mode,
            pop_share_queue_num=broker.default_pop_share_queues,
        )

    def _allocation(
        self,
        request: QueryAssignmentRequestBody,
        mode: SetMessageRequestModeRequestBody,
        queues: TopicQueues,
    ) -> Allocation | None:
        """Computes the queues of the client, in the thread pool; None if that is not possible.

        Raises Refused for too many queues.
        """
        shared = self._settings.current.broker.share_queues
        if request.message_model == BROADCASTING or not shared:
            _refuse_too_many(request.topic, len(queues))
            return lambda: queues
        group = self._clients.consumer_group(request.consumer_group)
        strategy = STRATEGIES.get(request.strategy_name or "")
        if group is None or strategy is None:
            return None
        consumers, client_id = group.client_ids(), request.client_id
        share = -(-len(queues) // max(len(consumers), 1))
        if mode.mode != POP:
            _refuse_too_many(request.topic, share)
            return lambda: allocate_for_pull(strategy, client_id, queues, consumers)
        share_count = mode.pop_share_queue_num
        if 0 < share_count < len(consumers) - 1:  # else all queues of a broker are one entry
            _refuse_too_many(request.topic, share * (share_count + 1))
        return lambda: allocate_for_pop(strategy, client_id, queues, consumers, share_count)

    def _queues(self, topic: str, route: TopicRouteData | None) -> TopicQueues | None:
        """The queues of a topic on all brokers; None if they are unknown."""
        counts = self._known_queues(topic) if route is None else _count(route)
        if counts is None:
            self._counts.pop(topic, None)
            return None
        if route is not None:
            if topic not in self._counts and len(self._counts) >= ROUTES_MAX:
                del self._counts[next(iter(self._counts))]
            self._counts[topic] = counts
        return TopicQueues(topic, counts)

    def _known_queues(self, topic: str) -> dict[str, int] | None:
        """Queues per broker without a NameServer: by the last route, or of this broker if it has
        no NameServers. None if the topic does not exist here either."""
        config, broker = self._topics.get(topic), self._settings.current.broker
        if config is None:
            return None
        if not broker.nameservers:
            return {broker.name: config.read_queue_nums} if config.perm & PERM_READ else {}
        return self._counts.get(topic)


def _refuse_too_many(topic: str, queues: int) -> None:
    if queues > ASSIGNED_MAX:
        raise Refused.over(
            f"one consumer would get too many queues of the topic {topic}",
            figure=queues,
            limit=ASSIGNED_MAX,
            unit="queues",
            hint="start more consumers, or reduce the queues of the topic",
        )


def _count(route: TopicRouteData) -> dict[str, int]:
    """The number of readable queues of a route, by broker."""
    counts: dict[str, int] = {}
    for data in route.queue_datas:
        if data.perm & PERM_READ:
            counts[data.broker_name] = max(counts.get(data.broker_name, 0), data.read_queue_nums)
    return counts
