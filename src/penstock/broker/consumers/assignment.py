"""Which queues a client shall consume, and how: QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE.

A consumer that leaves the sharing to the broker asks for each of its topics, some 20 s apart and
whenever its group changes. It is told its queues, and for each whether to pull or to pop. An answer
without queues makes it give up those it has; an answer without a list means that nothing is known
now, and it goes on as before.

The queues of a topic may lie on several brokers, so the route comes from the NameServers. The last
one is kept for when none of them answers: a consumer must not lose the queues of other brokers
because of that.
"""

from typing import ClassVar, Final

from penstock.broker.consumers.allocation import (
    STRATEGIES,
    TopicQueues,
    share_to_pop,
    share_to_pull,
)
from penstock.broker.consumers.clients import BROADCASTING, Clients
from penstock.broker.consumers.groups import Groups
from penstock.broker.topics import Topics
from penstock.config import Live
from penstock.errors import InvalidParameter, NoPermission
from penstock.rpc.answers import Answer, InThread, PersistentTable, QueryRoute, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_from_pool, reply_with
from penstock.rpc.persistence import Persistence
from penstock.rpc.router import Row
from penstock.store.tables import ConfigFile
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
"""Most topics whose last route is kept."""


class RequestModes:
    """Which groups pull and which pop, by topic: only those that were told."""

    FILE: ClassVar[str] = "config/messageRequestMode.json"

    def __init__(self) -> None:
        self.dirty = False
        self._modes: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}

    def load(self, file: ConfigFile) -> None:
        """Take over what the file holds."""
        found = file.load(lambda data: fastjson.decode(data, MessageRequestModeSerializeWrapper))
        if found is not None:
            self._modes = {
                topic: dict(groups) for topic, groups in found.message_request_mode_map.items()
            }

    def get(self, topic: str, group: str) -> SetMessageRequestModeRequestBody | None:
        """What the group was told to do on the topic."""
        return self._modes.get(topic, {}).get(group)

    def put(self, mode: SetMessageRequestModeRequestBody) -> None:
        """Tell a group what to do on a topic."""
        self._modes.setdefault(mode.topic, {})[mode.consumer_group] = mode
        self.dirty = True

    def wrapper(self) -> MessageRequestModeSerializeWrapper:
        """The table as the typed value of its file."""
        return MessageRequestModeSerializeWrapper(message_request_mode_map=self._modes)

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(self.wrapper())


class Assignments:
    """Shares queues among the members of a group."""

    def __init__(
        self,
        settings: Live,
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
        self._counts: dict[str, dict[str, int]] = {}  # topic → broker → queues, as last heard

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.QUERY_ASSIGNMENT, self.query),
            Row(RequestCode.SET_MESSAGE_REQUEST_MODE, self.set_mode),
            Row(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, self.get_modes),
        ]

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self.modes,)

    def query(self, command: Command) -> Answer:
        """The queues of one client on one topic."""
        asked = command.body_as(QueryAssignmentRequestBody)
        if not asked.topic or not asked.consumer_group or not asked.client_id:
            raise InvalidParameter("an assignment is asked for by topic, consumerGroup, clientId")
        if asked.message_model not in (CLUSTERING, BROADCASTING):
            raise InvalidParameter(f"there is no message model {asked.message_model!r}")
        if asked.topic.startswith(LMQ_PREFIX) and asked.message_model == CLUSTERING:
            own = {self._settings.current.broker.name: 1}
            return self._answer(asked, TopicQueues(asked.topic, own))
        return QueryRoute(
            asked.topic, lambda route: self._answer(asked, self._queues(asked.topic, route))
        )

    def set_mode(self, command: Command) -> Answer:
        """From now on a group pulls or pops a topic; answered when that is on the disk."""
        wanted = command.body_as(SetMessageRequestModeRequestBody)
        if wanted.topic.startswith(RETRY_TOPIC_PREFIX):
            raise NoPermission(
                f"{wanted.topic} is a retry topic: consumers pull it",
                hint="set the mode of the topic itself; its retries follow",
            )
        if wanted.mode not in (PULL, POP):
            raise InvalidParameter(f"the mode {wanted.mode!r} is neither PULL nor POP")
        self._topics.need(wanted.topic)
        self._groups.find(wanted.consumer_group, command.now_ms)
        self.modes.put(wanted)
        return InThread(self._persistence.save(self.modes), lambda _: Reply())

    def get_modes(self, command: Command) -> Answer:
        """Which groups were told to pull or to pop."""
        return reply_with(self.modes.wrapper())

    def _answer(self, asked: QueryAssignmentRequestBody, queues: TopicQueues | None) -> Answer:
        mode = self._mode(asked.topic, asked.consumer_group)
        share = None if queues is None else self._share(asked, mode, queues)
        if share is None:
            return reply_with(QueryAssignmentResponseBody())
        return reply_from_pool(
            lambda: QueryAssignmentResponseBody(
                message_queue_assignments=[
                    MessageQueueAssignment(message_queue=queue, mode=mode.mode)
                    for queue in dict.fromkeys(share)
                ]
            )
        )

    def _mode(self, topic: str, group: str) -> SetMessageRequestModeRequestBody:
        told = self.modes.get(topic, group)
        if told is not None:
            return told
        broker = self._settings.current.broker
        retry = topic.startswith(RETRY_TOPIC_PREFIX)
        return SetMessageRequestModeRequestBody(
            topic=topic,
            consumer_group=group,
            mode=PULL if retry else broker.default_request_mode,
            pop_share_queue_num=broker.default_pop_share_queues,
        )

    def _share(
        self,
        asked: QueryAssignmentRequestBody,
        mode: SetMessageRequestModeRequestBody,
        queues: TopicQueues,
    ) -> list[MessageQueue] | TopicQueues | None:
        """The queues of the client; None if that can't be told."""
        if asked.message_model == BROADCASTING:
            return queues
        if not self._settings.current.broker.share_queues:
            return queues
        group = self._clients.consumer_group(asked.consumer_group)
        strategy = STRATEGIES.get(asked.strategy_name or "")
        if group is None or strategy is None:
            return None
        consumers = sorted(group.connections)
        if mode.mode == POP:
            helpers = mode.pop_share_queue_num
            return share_to_pop(strategy, asked.client_id, queues, consumers, helpers)
        return share_to_pull(strategy, asked.client_id, queues, consumers)

    def _queues(self, topic: str, route: TopicRouteData | None) -> TopicQueues | None:
        """The queues of a topic on all brokers; None if they are not known."""
        counts = self._own(topic) if route is None else _count(route)
        if counts is None:
            self._counts.pop(topic, None)
            return None
        if route is not None:
            if topic not in self._counts and len(self._counts) >= ROUTES_MAX:
                del self._counts[next(iter(self._counts))]
            self._counts[topic] = counts
        return TopicQueues(topic, counts)

    def _own(self, topic: str) -> dict[str, int] | None:
        """What is known without the NameServers: the last route, or this broker if it stands
        alone. A topic that is not here either is gone."""
        config, broker = self._topics.get(topic), self._settings.current.broker
        if config is None:
            return None
        if not broker.nameservers:
            return {broker.name: config.read_queue_nums} if config.perm & PERM_READ else {}
        return self._counts.get(topic)


def _count(route: TopicRouteData) -> dict[str, int]:
    """How many queues of a route may be read, by broker."""
    counts: dict[str, int] = {}
    for data in route.queue_datas:
        if data.perm & PERM_READ:
            counts[data.broker_name] = max(counts.get(data.broker_name, 0), data.read_queue_nums)
    return counts
