"""The small tables of a broker and their files in `config/`, in RocketMQ's own formats.

    config/topics.json             TopicTable               a version for every change
    config/subscriptionGroup.json  SubscriptionGroupTable   a version for every change
    config/consumerOffset.json     ConsumerOffsetTable      a version for every 500 commits
                                   (`store.consumer_offset_table`)
    config/delayOffset.json        DelayOffsetTable         a version for every 200 commits

A table is plain data: the time comes as `now_ms`, nothing here waits, writes or locks. A change
sets `dirty`; `snapshot` returns the file's new content and clears it (large tables also have
`begin_snapshot`, which leaves most of the work to the thread pool); a caller that then fails to
write sets it again. Unknown members of a file are kept and written back.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import msgspec

from penstock.errors import BodyError, StoreDamaged
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, SubscriptionGroupConfig, TopicConfig
from penstock.wire.bodies.table_bodies import (
    DelayOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
)

log = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 256 * 1024 * 1024
DELAY_OFFSET_STEP: Final = 200
GAP: Final = b"\0"  # never in JSON, where it is escaped
FORBID_READ: Final = 4  # bit of a forbidden table

T = TypeVar("T")


class ConfigDisk(Protocol):
    """What a config file needs of a disk; `replace` keeps the old content as `.bak`."""

    def read(self, path: Path) -> bytes | None: ...

    def replace(self, path: Path, data: bytes) -> None: ...

    def rename(self, old: Path, new: Path) -> None: ...


class ConfigFile:
    """A file that is only replaced as a whole; the previous content is kept as `.bak`."""

    def __init__(self, disk: ConfigDisk, path: Path) -> None:
        self._disk = disk
        self.path = path

    def load(self, parse: Callable[[bytes], T]) -> T | None:
        """The parsed file, or else its `.bak`; None if neither exists.

        `parse` raises BodyError. If only the `.bak` can be read, the main file is renamed to
        `.damaged`: otherwise the next persist would replace the `.bak` by it.
        """
        main = self._disk.read(self.path)
        backup = self._disk.read(self._beside(".bak"))
        fault = "is missing" if main is None else "is empty"
        try:
            if main:
                return parse(main)
        except BodyError as error:
            if not backup:
                raise self._damaged(error) from None
            fault = f"can't be read ({error})"
        if not backup:
            if main is not None:
                log.warning("%s %s and has no .bak: starting without it", self.path, fault)
            return None
        try:
            value = parse(backup)
        except BodyError as error:
            raise self._damaged(error) from None
        if main is not None:
            self._disk.rename(self.path, self._beside(".damaged"))
            fault += " and was renamed to .damaged"
        log.warning("%s %s: using the .bak, perhaps without the last change", self.path, fault)
        return value

    def is_new(self) -> bool:
        """Whether neither the file nor its `.bak` exists."""
        return self._disk.read(self.path) is None and self._disk.read(self._beside(".bak")) is None

    def persist(self, data: bytes) -> None:
        """Replace the file by `data`; a crash leaves the old or the new content."""
        self._disk.replace(self.path, data)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _damaged(self, error: BodyError) -> StoreDamaged:
        return StoreDamaged(
            f"{self.path} and its .bak can't be read: {error}",
            hint=f"restore {self.path.name} from a backup, or repair it",
        )


W = TypeVar("W", bound=msgspec.Struct)


class Table(ABC, Generic[W]):
    """A version, a dirty flag, the file and its unknown members."""

    FILE: ClassVar[str]
    KIND: type[W]  # the typed value of the file
    STEP: ClassVar[int] = 1  # changes per version
    DERIVED: ClassVar[frozenset[str]] = frozenset()  # members of the file that follow from others

    def __init__(self) -> None:
        self.version = DataVersion()
        self.state_version = 0  # the master's epoch, where there is a controller
        self.dirty = False
        self._changes = 0
        self._unknown: dict[str, Any] = {}

    def load(self, file: ConfigFile) -> bool:
        """Take over the file's content; False if there is no file yet."""
        parsed = file.load(self._parse)
        if parsed is None:
            return False
        wrapper, self._unknown = parsed
        self._install(wrapper)
        self.dirty = False
        return True

    def snapshot(self) -> bytes:
        """The whole file, as fastjson writes it; the table is clean afterwards."""
        members = {**self._unknown, **self._members()}
        text = fastjson.encode_pretty(dict(sorted(members.items())))
        self.dirty = False
        return text

    def body(self) -> bytes:
        """The table as the response to a slave or a tool that requests all of it.

        Strict, because RocketMQ 5.5.0 refuses bare numbers as keys (apache/rocketmq#10284).
        """
        return fastjson.encode_strict(self.wrapper())

    @abstractmethod
    def wrapper(self) -> W:
        """The table as the typed value of its file; shares the entries."""

    @abstractmethod
    def _install(self, wrapper: W) -> None:
        """Take over a file's value."""

    def _members(self) -> dict[str, Any]:
        wrapper = self.wrapper()
        names = zip(wrapper.__struct_encode_fields__, wrapper.__struct_fields__, strict=True)
        return {name: getattr(wrapper, attribute) for name, attribute in names}

    def _changed(self, now_ms: int) -> None:
        self.dirty = True
        self._changes += 1
        if self._changes % self.STEP == 0:
            self.version = self.version.next(now_ms, state_version=self.state_version)

    def _parse(self, data: bytes) -> tuple[W, dict[str, Any]]:
        limits = {"bytes_max": FILE_BYTES_MAX, "loose_bytes_max": FILE_BYTES_MAX}
        kind = self.KIND
        members = fastjson.decode(data, dict[str, Any], **limits)
        try:
            wrapper = fastjson.build(members, kind)
        except BodyError:
            wrapper = fastjson.decode(data, kind, **limits)  # there, nulls count as absent
        known = {*kind.__struct_encode_fields__, *self.DERIVED}
        return wrapper, {name: value for name, value in members.items() if name not in known}


class _ConfigTable(Table[W]):
    """A table of configs by name.

    Each change of one config writes the whole file, and there may be 50,000 configs. So the text of
    each is kept, and the thread pool joins them.
    """

    MEMBER: ClassVar[str]  # the member of the file that holds the configs

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, bytes] = {}  # in the order of the configs

    def snapshot(self) -> bytes:
        return self.begin_snapshot()()

    def begin_snapshot(self) -> Callable[[], bytes]:
        """The work that makes the snapshot, for the thread pool; the table is clean from now on."""
        gap = fastjson.RawJson(GAP.decode())
        members = {**self._unknown, **self._members(), self.MEMBER: gap}
        frame = fastjson.encode_pretty(dict(sorted(members.items())))
        before, _, after = frame.partition(GAP)
        texts = list(self._texts.values())
        self.dirty = False

        def join() -> bytes:
            if not texts:
                return before + b"{}" + after
            texts[0] = before + b"{" + texts[0]
            texts[-1] += b"\n\t}" + after
            return b",".join(texts)  # one copy of what may be megabytes

        return join

    def _write(self, name: str, config: msgspec.Struct) -> None:
        """Keep the text of a config; raises BodyError if it can't be encoded."""
        lines = fastjson.encode_pretty({name: config})[1:-2]  # without the braces
        self._texts[name] = lines.replace(b"\n", b"\n\t")  # newlines inside values are escaped


class TopicTable(_ConfigTable[TopicConfigSerializeWrapper]):
    """The topics of a broker by name."""

    FILE = "config/topics.json"
    KIND = TopicConfigSerializeWrapper
    MEMBER = "topicConfigTable"

    def __init__(self) -> None:
        super().__init__()
        self._topics: dict[str, TopicConfig] = {}
        self.queues = 0  # of all topics
        self.topics: Mapping[str, TopicConfig] = MappingProxyType(self._topics)

    def get(self, topic: str) -> TopicConfig | None:
        """The topic of this name."""
        return self._topics.get(topic)

    def seed(self, config: TopicConfig) -> None:
        """Add a topic that every broker has, if it is missing, without a new version."""
        if config.topic_name not in self._topics:
            self._set(config)
            self.dirty = True

    def put(self, config: TopicConfig, now_ms: int) -> None:
        """Create or change the topic."""
        self._set(config)
        self._changed(now_ms)

    def touch(self, now_ms: int) -> None:
        """A new version of the same topics, because NameServers have to be told something else."""
        self._changed(now_ms)

    def remove(self, topic: str, now_ms: int) -> TopicConfig | None:
        """Remove the topic; None if it does not exist."""
        config = self._topics.pop(topic, None)
        if config is not None:
            self.queues -= config.queues
            del self._texts[topic]
            self._changed(now_ms)
        return config

    def replace(self, wrapper: TopicConfigSerializeWrapper) -> None:
        """Take over the table of another broker, version included."""
        self._install(wrapper)
        self.dirty = True

    def wrapper(self) -> TopicConfigSerializeWrapper:
        return TopicConfigSerializeWrapper(
            topic_config_table=self._topics, data_version=self.version
        )

    def _install(self, wrapper: TopicConfigSerializeWrapper) -> None:
        self._topics.clear()
        self.queues = 0
        self._texts.clear()
        for name, config in wrapper.topic_config_table.items():
            if config.topic_name != name:
                config = msgspec.structs.replace(config, topic_name=name)
            self._set(config)
        self.version = wrapper.data_version

    def _set(self, config: TopicConfig) -> None:
        self._write(config.topic_name, config)
        before = self._topics.get(config.topic_name)
        self.queues += config.queues - (before.queues if before is not None else 0)
        self._topics[config.topic_name] = config


class SubscriptionGroupTable(_ConfigTable[SubscriptionGroupWrapper]):
    """The consumer groups of a broker by name, and the topics that they may not read."""

    FILE = "config/subscriptionGroup.json"
    KIND = SubscriptionGroupWrapper
    MEMBER = "subscriptionGroupTable"

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, SubscriptionGroupConfig] = {}
        self._forbidden: dict[str, dict[str, int]] = {}
        self.groups: Mapping[str, SubscriptionGroupConfig] = MappingProxyType(self._groups)

    def get(self, group: str) -> SubscriptionGroupConfig | None:
        """The group of this name."""
        return self._groups.get(group)

    def seed(self, config: SubscriptionGroupConfig) -> None:
        """Add a group that every broker has, if it is missing, without a new version."""
        if config.group_name not in self._groups:
            self._set(config)
            self.dirty = True

    def put(self, config: SubscriptionGroupConfig, now_ms: int) -> None:
        """Create or change the group."""
        self._set(config)
        self._changed(now_ms)

    def remove(self, group: str, now_ms: int) -> SubscriptionGroupConfig | None:
        """Remove the group and its forbidden topics; None if it does not exist."""
        config = self._groups.pop(group, None)
        self._texts.pop(group, None)
        forbidden = self._forbidden.pop(group, None)
        if config is not None or forbidden is not None:
            self._changed(now_ms)
        return config

    def forbidden(self, group: str, topic: str) -> int:
        """The bits that are forbidden to the group on the topic."""
        return max(self._forbidden.get(group, {}).get(topic, 0), 0)

    def forbidden_count(self) -> int:
        """The number of pairs of group and topic with forbidden bits."""
        return sum(map(len, self._forbidden.values()))

    def forbid(self, group: str, topic: str, bits: int, now_ms: int) -> None:
        """Set the forbidden bits; 0 allows everything."""
        topics = self._forbidden.setdefault(group, {})
        topics[topic] = bits
        if bits <= 0:
            del topics[topic]
        if not topics:
            del self._forbidden[group]
        self._changed(now_ms)

    def replace(self, wrapper: SubscriptionGroupWrapper) -> None:
        """Take over the table of another broker, version included."""
        self._install(wrapper)
        self.dirty = True

    def wrapper(self) -> SubscriptionGroupWrapper:
        return SubscriptionGroupWrapper(
            subscription_group_table=self._groups,
            forbidden_table=self._forbidden,
            data_version=self.version,
        )

    def _install(self, wrapper: SubscriptionGroupWrapper) -> None:
        self._groups.clear()
        self._texts.clear()
        for name, config in wrapper.subscription_group_table.items():
            if config.group_name != name:
                config = msgspec.structs.replace(config, group_name=name)
            self._set(config)
        self._forbidden = wrapper.forbidden_table
        self.version = wrapper.data_version

    def _set(self, config: SubscriptionGroupConfig) -> None:
        self._write(config.group_name, config)
        self._groups[config.group_name] = config


class DelayOffsetTable(Table[DelayOffsetSerializeWrapper]):
    """How far each delay level has been delivered: the next offset of its queue."""

    FILE = "config/delayOffset.json"
    KIND = DelayOffsetSerializeWrapper
    STEP = DELAY_OFFSET_STEP

    def __init__(self) -> None:
        super().__init__()
        self._offsets: dict[int, int] = {}
        self.offsets: Mapping[int, int] = MappingProxyType(self._offsets)

    def get(self, level: int) -> int:
        """The next offset of the level; 0 where nothing was delivered yet."""
        return self._offsets.get(level, 0)

    def commit(self, level: int, offset: int, now_ms: int) -> None:
        """Set the next offset of the level."""
        self._offsets[level] = offset
        self._changed(now_ms)

    def replace(self, wrapper: DelayOffsetSerializeWrapper) -> None:
        """Take over the table of another broker, version included."""
        self._install(wrapper)
        self.dirty = True

    def wrapper(self) -> DelayOffsetSerializeWrapper:
        return DelayOffsetSerializeWrapper(offset_table=self._offsets, data_version=self.version)

    def _install(self, wrapper: DelayOffsetSerializeWrapper) -> None:
        self._offsets.clear()
        self._offsets.update(wrapper.offset_table)
        self.version = wrapper.data_version
