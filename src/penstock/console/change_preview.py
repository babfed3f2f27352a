"""What a change of a topic's or a group's settings would do on each broker, before it is made.

A change removes something if messages that can be read, or will be, can't be read afterwards, or if
producers or members lose a right. Each such loss is a sentence about one broker.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.client.admin.async_admin import (
    GroupInfo,
    GroupSettings,
    QueueState,
    TopicDescription,
    TopicSettings,
)
from penstock.client.diagnosis.wording import count_text
from penstock.console.endpoints import ApiError
from penstock.wire.codes import PERM_READ, PERM_WRITE


@dataclass(frozen=True, slots=True)
class BrokerChange:
    """A change on one broker: setting → its values before and after."""

    broker: str
    changes: Mapping[str, tuple[object, object]]
    losses: tuple[str, ...]
    unreadable: Mapping[int, int]
    """Queue → stored messages that can't be read afterwards."""

    def json(self) -> dict[str, object]:
        return {
            "broker": self.broker,
            "changes": [
                {"setting": setting, "before": before, "after": after}
                for setting, (before, after) in self.changes.items()
            ],
            "losses": list(self.losses),
            "unreadable": [
                {"queue": queue, "messages": count} for queue, count in self.unreadable.items()
            ],
        }


def preview_json(changes: Sequence[BrokerChange], unreachable: Sequence[str]) -> dict[str, object]:
    """A preview; `removes` is whether the change needs a confirmation."""
    return {
        "brokers": [one.json() for one in changes],
        "removes": any(one.losses for one in changes),
        "unreachable": list(unreachable),
    }


def need_confirmation(changes: Sequence[BrokerChange], confirmed: bool) -> None:
    """Raise ApiError if a change removes something and nobody has confirmed that."""
    losses = [loss for one in changes for loss in one.losses]
    if losses and not confirmed:
        raise ApiError(
            409,
            f"the change removes something: {'; '.join(losses)}",
            "see the preview, and send the change again with confirm: true",
        )


def topic_preview(described: TopicDescription, wanted: Mapping[str, Any]) -> list[BrokerChange]:
    """The changes on each broker that has the topic; `wanted` are arguments of `update_topic`."""
    found = []
    for broker, before in described.topic.brokers.items():
        after = _changed_topic(before, wanted)
        queues = [state for state in described.queues if state.queue.broker_name == broker]
        unreadable = {
            state.queue.queue_id: state.count
            for state in queues
            if state.count and _can_read(before, state) and not _can_read(after, state)
        }
        found.append(
            BrokerChange(
                broker,
                _differences(_topic_values(before), _topic_values(after)),
                tuple(_topic_losses(broker, before, after, sum(unreadable.values()))),
                unreadable,
            )
        )
    return found


def group_preview(info: GroupInfo, wanted: Mapping[str, Any]) -> list[BrokerChange]:
    """The changes on each broker that has the group."""
    found = []
    for broker, before in info.brokers.items():
        after = replace(before, **wanted)
        values = [{name: getattr(one, name) for name in wanted} for one in (before, after)]
        losses = tuple(_group_losses(broker, before, after))
        found.append(BrokerChange(broker, _differences(*values), losses, {}))
    return found


def _changed_topic(before: TopicSettings, wanted: Mapping[str, Any]) -> TopicSettings:
    both = wanted.get("queues")
    perm = wanted.get("perm")
    attributes = {**before.attributes, **wanted.get("attributes", {})}
    return TopicSettings(
        read_queues=wanted.get("read_queues", before.read_queues if both is None else both),
        write_queues=wanted.get("write_queues", before.write_queues if both is None else both),
        perm=before.perm
        if perm is None
        else (PERM_READ if "r" in perm else 0) | (PERM_WRITE if "w" in perm else 0),
        order=wanted.get("order", before.order),
        attributes=attributes,
    )


def _topic_values(settings: TopicSettings) -> dict[str, object]:
    return {
        "read_queues": settings.read_queues,
        "write_queues": settings.write_queues,
        "perm": settings.perm_text,
        "order": settings.order,
        "message_type": settings.message_type,
    }


def _differences(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    return {name: (value, after[name]) for name, value in before.items() if value != after[name]}


def _can_read(settings: TopicSettings, state: QueueState) -> bool:
    return bool(settings.perm & PERM_READ) and state.queue.queue_id < settings.read_queues


def _topic_losses(
    broker: str, before: TopicSettings, after: TopicSettings, messages: int
) -> Iterator[str]:
    if messages:
        yield f"{count_text(messages, 'message')} on {broker} can't be read afterwards"
    if before.perm & PERM_READ and not after.perm & PERM_READ:
        yield f"consumers receive nothing from {broker}"
    elif after.read_queues < before.read_queues:
        removed = before.read_queues - after.read_queues
        verb = "is" if removed == 1 else "are"
        yield f"{count_text(removed, 'read queue')} {verb} removed from {broker}"
    if before.perm & PERM_WRITE and not after.perm & PERM_WRITE:
        yield f"producers can't send to {broker}"
    if _unread_queues(after) > _unread_queues(before):
        first, last = after.read_queues, after.write_queues - 1
        queues = f"queue {first}" if first == last else f"queues {first} to {last}"
        yield f"what producers send to {queues} of {broker} can't be read"


def _unread_queues(settings: TopicSettings) -> int:
    """Queues that producers use and consumers don't."""
    return max(settings.write_queues - settings.read_queues, 0)


def _group_losses(broker: str, before: GroupSettings, after: GroupSettings) -> Iterator[str]:
    if before.consume_enabled and not after.consume_enabled:
        yield f"members receive nothing from {broker}"
    if before.broadcast_enabled and not after.broadcast_enabled:
        yield f"members that broadcast receive nothing from {broker}"
