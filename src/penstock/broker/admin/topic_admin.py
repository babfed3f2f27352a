"""Administration of topics."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import msgspec

from penstock.broker.admin.large_requests import Pages
from penstock.broker.attributes import TOPIC_ATTRIBUTES, alter, parse_changes
from penstock.broker.context import BrokerContext
from penstock.broker.topics import QUEUES_MAX
from penstock.errors import InvalidParameter
from penstock.rpc.answers import REGISTER_MS, Answer, InThread, RegisterTopics, Reply
from penstock.rpc.command import Command
from penstock.rpc.json_replies import reply_with
from penstock.rpc.router import Row
from penstock.rpc.steps import in_steps, run_in_steps
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import CreateTopicListRequestBody, TopicConfigAndQueueMapping
from penstock.wire.bodies.client_bodies import TopicConfig, TopicList
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import (
    PERM_PRIORITY,
    PERM_TEMPLATE,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
    topic_fault,
)
from penstock.wire.receipt_handle import RetryKind, plain_topic, retry_topic

_PERM_MAX = PERM_TEMPLATE | PERM_PRIORITY
_FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")


class TopicHandlers:
    """Handles UPDATE_AND_CREATE_TOPIC, DELETE_TOPIC_IN_BROKER and related requests."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._pages = Pages(first="topicSeq", count="maxTopicNum")

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.UPDATE_AND_CREATE_TOPIC, self.create),
            Row(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, self.create_several),
            Row(RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, self.refuse_static),
            Row(RequestCode.DELETE_TOPIC_IN_BROKER, self.delete),
            Row(RequestCode.GET_TOPIC_CONFIG, self.get),
            Row(RequestCode.GET_ALL_TOPIC_CONFIG, self.get_all),
            Row(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.list_system),
        ]

    def create(self, command: Command) -> Answer:
        """Create or change a topic; the response is sent when it is saved and registered."""
        wanted = TopicConfig(
            topic_name=command.text("topic"),
            read_queue_nums=command.i32("readQueueNums"),
            write_queue_nums=command.i32("writeQueueNums"),
            perm=command.i32("perm"),
            topic_filter_type=command.text_or("topicFilterType", _FILTER_TYPES[0]),
            topic_sys_flag=command.i32_or("topicSysFlag", 0),
            order=command.truth("order"),
            attributes=parse_changes(command.text_or("attributes")),
        )
        return self._put([wanted], command.now_ms)

    def create_several(self, command: Command) -> Answer:
        """Like `create` for a list: all topics or, if one of them is not valid, none."""
        return self._put(
            command.body_as(CreateTopicListRequestBody).topic_config_list, command.now_ms
        )

    def refuse_static(self, command: Command) -> Answer:
        """Refuse static topics, whose queues move between brokers."""
        return Reply(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            remark=f"the topic {command.text_or('topic')} can't be static: this broker does not "
            "support static topics; create it with mqadmin updateTopic",
        )

    def delete(self, command: Command) -> Answer:
        """Delete a topic: its config, its consumer offsets, its queues and retry topics."""
        topic = command.text("topic")
        context, now_ms = self._context, command.now_ms
        if not topic.strip():
            raise InvalidParameter("the topic's name is blank")
        self._refuse_system(topic)
        groups = context.offsets.groups_of_topic(topic)
        names = chain([topic], self._retry_topics(topic, groups, now_ms))
        return run_in_steps(self._delete_all(names, now_ms), lambda: self._deleted(now_ms))

    def _retry_topics(self, topic: str, groups: Iterable[str], now_ms: int) -> Iterator[str]:
        """The retry topics of POP that are deleted with a topic. In one that is shared with others,
        the group skips its messages instead."""
        for group in groups:
            yield retry_topic(topic, group, RetryKind.V2)
            name = retry_topic(topic, group, RetryKind.V1)
            if self._is_shared(name, group):
                self._skip_all(name, group, now_ms)
            else:
                yield name

    def _is_shared(self, retry: str, group: str) -> bool:
        """Whether the retry topic of a group and a topic is that of others too."""
        context = self._context
        if context.groups.get(retry.removeprefix(RETRY_TOPIC_PREFIX)) is not None:
            return True
        plain_topics = (
            plain_topic(retry, other)
            for other in context.offsets.groups_of_topic(retry)
            if other != group
        )
        return any(
            plain != retry and context.topics.get(plain) is not None for plain in plain_topics
        )

    def _skip_all(self, topic: str, group: str, now_ms: int) -> None:
        context, config = self._context, self._context.topics.get(topic)
        for queue_id in range(config.read_queue_nums if config is not None else 0):
            end = context.store.max_offset(topic, queue_id)
            context.offsets.commit(group, topic, queue_id, end, now_ms)

    def _delete_all(self, names: Iterable[str], now_ms: int) -> Iterator[None]:
        """Delete topics with their offsets, step by step; names of no topic are skipped."""
        context = self._context
        for number, name in enumerate(names):
            yield
            if number and context.topics.get(name) is None:
                continue
            with context.topics.blocked(name) as blocked:
                if not blocked:
                    continue
                for queue in context.topics.delete(name, now_ms):
                    context.long_polling.wake_queue(queue)
                    yield
                yield from context.offsets.remove_topic(name, now_ms)

    def _deleted(self, now_ms: int) -> Answer:
        context = self._context
        saves = [context.persistence.save(t) for t in (context.topics.table, context.offsets.table)]
        # A registration that is in flight would bring the topic back after the tool has deleted
        # it from the NameServers: it is over when the next one is.
        return _reply_after(
            [*saves, context.store.finish_removal], RegisterTopics(Reply, now_ms + REGISTER_MS)
        )

    def get(self, command: Command) -> Answer:
        """One topic."""
        config = self._context.topics.need(command.text("topic"))
        return reply_with(TopicConfigAndQueueMapping(**msgspec.structs.asdict(config)))

    def get_all(self, command: Command) -> Answer:
        """The whole table, or a page of it."""
        table = self._context.topics.table
        names = self._pages.names(command, table.topics, table.version)
        topics = dict(table.topics) if names is None else {n: table.topics[n] for n in names}
        body = TopicConfigAndMappingSerializeWrapper(
            topic_config_table=topics, data_version=table.version
        )
        ext = {"totalTopicNum": str(len(table.topics))}
        # In the thread pool: the body of 10,000 topics has 2 MB.
        return InThread(lambda: fastjson.encode(body), lambda data: Reply(ext=ext, body=data))

    def list_system(self, command: Command) -> Answer:
        """The names of the system topics."""
        return reply_with(TopicList(topic_list=self._context.topics.system_names()))

    def _put(self, wanted: list[TopicConfig], now_ms: int) -> Answer:
        configs: list[TopicConfig] = []
        return in_steps(
            wanted,
            lambda config: configs.append(self._checked(config)),
            lambda: self._put_checked(configs, now_ms),
        )

    def _put_checked(self, configs: list[TopicConfig], now_ms: int) -> Answer:
        topics = self._context.topics
        changed = [config for config in configs if config != topics.get(config.topic_name)]
        names = tuple(config.topic_name for config in configs)
        registered = RegisterTopics(Reply, now_ms + REGISTER_MS, names)
        if not changed:  # the registration of an earlier change may be pending
            return registered
        created = sum(topics.get(config.topic_name) is None for config in changed)
        if created:
            topics.check_count(created)
        known = [topics.get(config.topic_name) for config in changed]
        before = sum(config.queues for config in known if config is not None)
        topics.check_queues(sum(config.queues for config in changed) - before)
        return in_steps(
            changed,
            lambda config: topics.put(config, now_ms),
            lambda: _reply_after([self._context.persistence.save(topics.table)], registered),
        )

    def _checked(self, wanted: TopicConfig) -> TopicConfig:
        """The topic with its changed attributes; raises InvalidParameter."""
        fault = topic_fault(wanted.topic_name)
        if fault is not None:
            raise InvalidParameter(fault)
        self._refuse_system(wanted.topic_name)
        self._context.topics.refuse_blocked(wanted.topic_name)
        for kind, count in (("read", wanted.read_queue_nums), ("write", wanted.write_queue_nums)):
            if count < 0:
                raise InvalidParameter(f"the number of {kind} queues must not be negative: {count}")
            if count > QUEUES_MAX:
                raise InvalidParameter.over(
                    f"too many {kind} queues", figure=count, limit=QUEUES_MAX, unit="queues"
                )
        if not 0 <= wanted.perm <= _PERM_MAX:
            raise InvalidParameter(
                f"the permission {wanted.perm} is not valid; use 6 (rw), 4 (r) or 2 (w)"
            )
        if wanted.topic_filter_type not in _FILTER_TYPES:
            raise InvalidParameter(f"the filter type {wanted.topic_filter_type!r} is unknown")
        existing = self._context.topics.get(wanted.topic_name)
        current = existing.attributes if existing is not None else None
        attributes = alter(TOPIC_ATTRIBUTES, current, wanted.attributes)
        return msgspec.structs.replace(wanted, attributes=attributes)

    def _refuse_system(self, topic: str) -> None:
        if self._context.topics.is_system(topic):
            raise InvalidParameter(
                f"the topic {topic} is a system topic: it can't be changed or deleted"
            )


def _reply_after(steps: list[Callable[[], None]], then: Answer) -> InThread:
    """The answer `then`, after all steps have run in the thread pool."""

    def work() -> None:
        for step in steps:
            step()

    return InThread(work, lambda _: then)
