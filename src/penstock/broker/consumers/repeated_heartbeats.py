"""Heartbeats that repeat the last one of their connection: most of them, as clients send the same
body every 30 s.

A heartbeat that has just been applied would change nothing but times if it was applied again. That
stays so until something else changes what it had set. So what it was applied to is kept, and
compared on every use: the groups and the versions of what they contain, and the memberships. The
body is compared by its length and Python's hash, which has 64 bits and a random key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.broker.consumers.client_groups import ClientGroup, ConsumerGroup, GroupMember

if TYPE_CHECKING:
    from penstock.rpc.command import Command


@dataclass(slots=True)
class AppliedHeartbeat:
    """A heartbeat, and what it was applied to."""

    member: GroupMember
    body_length: int
    body_hash: int
    consumers: list[tuple[ConsumerGroup, int]] = field(default_factory=list)
    """The groups, and the versions that they had just after it was applied."""
    producers: list[ClientGroup] = field(default_factory=list)

    @classmethod
    def of(cls, command: Command, member: GroupMember) -> AppliedHeartbeat:
        """The heartbeat of a request, not applied to any group yet."""
        return cls(member, len(command.body), hash(command.body))

    def is_repeated_by(self, command: Command) -> bool:
        """Whether a request of the same connection is the same heartbeat."""
        return (
            self.body_length == len(command.body)
            and self.member.address == command.peer
            and self.member.language == command.language
            and self.member.version == command.version
            and self.member.user == command.user
            and self.body_hash == hash(command.body)
        )

    def names_groups_once(self) -> bool:
        """Whether no group is in it twice: then applying it again would not change anything."""
        consumers = {group.name for group, _ in self.consumers}
        producers = {group.name for group in self.producers}
        return len(consumers) == len(self.consumers) and len(producers) == len(self.producers)
