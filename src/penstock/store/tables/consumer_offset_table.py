"""The consumer offsets of a broker and their file, `config/consumerOffset.json`.

The file is written every few seconds. So the text of every `topic@group` is kept, and a commit
makes only its own text stale; the offsets of a group on very many queues have a text for each
QUEUES_PER_TEXT queue ids. A snapshot encodes the stale texts and leaves it to the thread pool to
join them all. Beyond STALE_TEXTS_MAX stale texts the commits encode, the oldest first.

Queue ids have quotes in the texts and in the body that slaves get: RocketMQ 5.5.0 refuses bare
numbers as keys (apache/rocketmq#10284). In the file they have none, as in RocketMQ's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from penstock.store.tables.config_tables import GAP, Table
from penstock.wire import fastjson
from penstock.wire.bodies.table_bodies import ConsumerOffsetSerializeWrapper

CONSUMER_OFFSET_STEP: Final = 500
STALE_TEXTS_MAX: Final = 256
QUEUES_PER_TEXT: Final = 256
"""Queues of a text: it is encoded in about 20 µs."""
_ALL: Final = None  # in place of a text's number: all queues of a `topic@group`


class ConsumerOffsetTable(Table[ConsumerOffsetSerializeWrapper]):
    """How far each group has consumed: the next offset of each queue."""

    FILE = "config/consumerOffset.json"
    KIND = ConsumerOffsetSerializeWrapper
    STEP = CONSUMER_OFFSET_STEP
    DERIVED = frozenset({"groupTopicMap"})

    def __init__(self) -> None:
        super().__init__()
        self._offsets: dict[str, dict[int, int]] = {}
        self._names: dict[str, bytes] = {}  # encoded keys, with a colon
        # Encoded entries, without the closing brace. Those in several texts are in the order of
        # their numbers' first commits, and come last in the file.
        self._texts: dict[str, bytes] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._stale: dict[
            tuple[str, int | None], None
        ] = {}  # (key, number of the text), oldest first
        self._topics: dict[str, dict[str, None]] = {}  # by group
        self._groups: dict[str, dict[str, None]] = {}  # by topic

    def get(self, topic: str, group: str, queue_id: int) -> int | None:
        """The next offset to consume; None if the group never committed one."""
        queues = self._offsets.get(f"{topic}@{group}")
        return None if queues is None else queues.get(queue_id)

    def queues(self, topic: str, group: str) -> Mapping[int, int]:
        """All committed offsets of the group on the topic, by queue."""
        return MappingProxyType(self._offsets.get(f"{topic}@{group}", {}))

    def commit(self, topic: str, group: str, queue_id: int, offset: int, now_ms: int) -> int | None:
        """Set the next offset, which may be smaller; returns the previous one."""
        key = f"{topic}@{group}"
        queues = self._offsets.get(key)
        if queues is None:
            queues = {}
            self._add(key, queues)
        before = queues.get(queue_id)
        queues[queue_id] = offset
        if key in self._parts:
            self._stale[key, queue_id // QUEUES_PER_TEXT] = None
        elif len(queues) > QUEUES_PER_TEXT:
            self._split(key)
        else:
            self._stale[key, _ALL] = None
        if len(self._stale) > STALE_TEXTS_MAX:
            self._write(*next(iter(self._stale)))
        self._changed(now_ms)
        return before

    def remove(self, topic: str, group: str, now_ms: int) -> None:
        """Remove the group's offsets on the topic."""
        key = f"{topic}@{group}"
        if self._offsets.pop(key, None) is None:
            return
        del self._names[key]
        self._texts.pop(key, None)
        self._stale.pop((key, _ALL), None)
        self._drop_parts(key)
        topic, _, group = key.rpartition("@")
        for table, name, other in ((self._topics, group, topic), (self._groups, topic, group)):
            del table[name][other]
            if not table[name]:
                del table[name]
        self._changed(now_ms)

    def copy(self, topic: str, source: str, target: str, now_ms: int) -> bool:
        """Give a group the offsets of another one on the topic; False if that has none."""
        origin, key = f"{topic}@{source}", f"{topic}@{target}"
        queues = self._offsets.get(origin)
        if queues is None:
            return False
        if origin == key:
            return True
        self.remove(topic, target, now_ms)
        self._add(key, dict(queues))
        parts = self._parts.get(origin)
        if parts is None:
            self._write(key, _ALL)
        else:  # the texts do not contain the key
            del self._texts[key]
            self._parts[key] = dict(parts)
            for number in parts:
                if (origin, number) in self._stale:
                    self._stale[key, number] = None
        self._changed(now_ms)
        return True

    def topics_of(self, group: str) -> list[str]:
        """The topics on which the group has committed."""
        return list(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> list[str]:
        """The groups that have committed on the topic."""
        return list(self._groups.get(topic, ()))

    def merge(self, wrapper: ConsumerOffsetSerializeWrapper) -> None:
        """Take over the master's offsets and version; entries that it lacks stay."""
        for key, queues in wrapper.offset_table.items():
            if queues and self._offsets.get(key) != queues:
                self._add(key, queues)
                self._drop_parts(key)
                if len(queues) > QUEUES_PER_TEXT:
                    self._split(key)
                else:
                    self._write(key, _ALL)
        self.version = wrapper.data_version
        self.dirty = True

    def snapshot(self) -> bytes:
        return self.begin_snapshot()()

    def begin_snapshot(self) -> Callable[[], bytes]:
        """The work that makes the snapshot, for the thread pool; the table is clean from now on."""
        members = {**self._unknown, **self._members()}
        frame = fastjson.encode_pretty(dict(sorted(members.items())))
        work = self._begin_join(frame, _with_bare_ids, line=b"\n\t\t", end=b"\n\t")
        self.dirty = False
        return work

    def body(self) -> bytes:
        return self.begin_body()()

    def begin_body(self) -> Callable[[], bytes]:
        """The work that makes the body, for the thread pool."""
        return self._begin_join(fastjson.encode_strict(self._members()), line=b"", end=b"")

    def wrapper(self) -> ConsumerOffsetSerializeWrapper:
        return ConsumerOffsetSerializeWrapper(offset_table=self._offsets, data_version=self.version)

    def _install(self, wrapper: ConsumerOffsetSerializeWrapper) -> None:
        for table in (self._offsets, self._names, self._texts, self._parts, self._stale):
            table.clear()
        self._topics.clear()
        self._groups.clear()
        self.merge(wrapper)

    def _members(self) -> dict[str, Any]:
        return {"dataVersion": self.version, "offsetTable": fastjson.RawJson(GAP.decode())}

    def _begin_join(
        self,
        frame: bytes,
        written: Callable[[bytes], bytes] | None = None,
        *,
        line: bytes,
        end: bytes,
    ) -> Callable[[], bytes]:
        """The work that puts the entries into a frame, as `written`: `line` goes before each entry
        and its closing brace, `end` before the last brace."""
        for key, number in list(self._stale):
            self._write(key, number)
        before, _, after = frame.partition(GAP)
        texts = list(self._texts.values())
        parts = [(self._names[key], list(parts.values())) for key, parts in self._parts.items()]

        def join() -> bytes:
            texts.extend(name + b"{" + b",".join(of_key) for name, of_key in parts)
            if not texts:
                return before + b"{}" + after
            if written is not None:
                texts[:] = map(written, texts)
            texts[0] = before + b"{" + line + texts[0]
            texts[-1] += line + b"}" + end + b"}" + after
            return (line + b"}," + line).join(texts)  # one copy of what may be megabytes

        return join

    def _add(self, key: str, queues: dict[int, int]) -> None:
        topic, _, group = key.rpartition("@")
        if key not in self._names:
            self._names[key] = fastjson.encode(key) + b":"
            self._texts[key] = b""  # its place in the order
        self._offsets[key] = queues
        self._topics.setdefault(group, {})[topic] = None
        self._groups.setdefault(topic, {})[group] = None

    def _split(self, key: str) -> None:
        """Keep the entry of a key in several texts from now on."""
        self._texts.pop(key, None)
        self._stale.pop((key, _ALL), None)
        by_number: dict[int, dict[int, int]] = {}
        for queue_id, offset in self._offsets[key].items():
            by_number.setdefault(queue_id // QUEUES_PER_TEXT, {})[queue_id] = offset
        self._parts[key] = {number: _numbers(queues) for number, queues in by_number.items()}

    def _drop_parts(self, key: str) -> None:
        for number in self._parts.pop(key, ()):
            self._stale.pop((key, number), None)

    def _write(self, key: str, number: int | None) -> None:
        self._stale.pop((key, number), None)
        queues = self._offsets[key]
        if number is _ALL:
            self._texts[key] = self._names[key] + b"{" + _numbers(queues)
            return
        queue_ids = range(number * QUEUES_PER_TEXT, (number + 1) * QUEUES_PER_TEXT)
        of_text = {queue_id: queues[queue_id] for queue_id in queue_ids if queue_id in queues}
        self._parts[key][number] = _numbers(of_text)


def _numbers(queues: Mapping[int, int]) -> bytes:
    """Queues and their offsets without braces."""
    return msgspec.json.encode(queues)[1:-1]


def _with_bare_ids(text: bytes) -> bytes:
    """An entry as fastjson writes it."""
    name, brace, numbers = text.rpartition(b"{")
    return name + brace + numbers.translate(None, b'"')
