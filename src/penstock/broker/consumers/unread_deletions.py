"""Logs what retention has deleted, and which groups had not read it.

Called in the thread pool: it only reads single entries of the table of offsets.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.consumers.consumer_offsets import ConsumerOffsets
from penstock.store.retention import Deletion
from penstock.wire.codes import is_system_group

log = logging.getLogger(__name__)

GROUPS_MAX: Final = 10
"""At most this many groups are named in one line."""


class UnreadDeletions:
    """Compares what was deleted with the offsets of the groups."""

    def __init__(self, offsets: ConsumerOffsets) -> None:
        self._offsets = offsets

    def log(self, deletion: Deletion) -> None:
        """Log one deletion."""
        unread = self.unread(deletion)
        text = deletion.text()
        if not unread:
            log.warning("%s; no group had messages left to read in them", text)
            return
        named = ", ".join(
            f"{group} ({count:,} messages of topic {topic})"
            for (group, topic), count in unread.most_common(GROUPS_MAX)
        )
        more = f" and {len(unread) - GROUPS_MAX:,} more" if len(unread) > GROUPS_MAX else ""
        log.warning("%s; not read by: %s%s", text, named, more)

    def unread(self, deletion: Deletion) -> Counter[tuple[str, str]]:
        """How many of the deleted messages a group had not read, by group and topic."""
        found: Counter[tuple[str, str]] = Counter()
        for topic, queue_id, first, end in deletion.queues:
            for group in self._offsets.groups_of_topic(topic):
                if is_system_group(group):
                    continue
                offset = self._offsets.get(group, topic, queue_id)
                if offset is not None and offset < end:
                    found[group, topic] += end - max(offset, first)
        return found
