"""Subscriptions: a topic and a filter by tags or by an SQL92 expression."""

from dataclasses import dataclass

from penstock.errors import BadFilter
from penstock.wire.bodies.client_bodies import SubscriptionData
from penstock.wire.record import java_hash

ALL = "*"
TAG = "TAG"
SQL92 = "SQL92"
_OR = "||"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic (with namespace) and its filter."""

    topic: str
    expression: str = ALL
    kind: str = TAG
    version: int = 0

    @classmethod
    def of(
        cls, topic: str, tags: str | None = None, sql: str | None = None, *, version: int
    ) -> "Subscription":
        """From the application's arguments: tags as "a || b", or an SQL92 expression."""
        if sql is not None:
            if tags not in (None, ALL):
                raise BadFilter(
                    f"the subscription to topic {topic} has both tags and an SQL92 expression",
                    hint="give one of them; an SQL92 expression can use TAGS",
                )
            if not sql.strip():
                raise BadFilter(f"the SQL92 expression for topic {topic} is empty")
            return cls(topic, sql, SQL92, version)
        names = split_tags(tags)
        if names is None:
            return cls(topic, ALL, TAG, version)
        return cls(topic, " || ".join(sorted(names)), TAG, version)

    @property
    def tags(self) -> frozenset[str] | None:
        """The subscribed tags; None: all."""
        return split_tags(self.expression) if self.kind == TAG else None

    @property
    def tag_bytes(self) -> frozenset[bytes] | None:
        """The tags as bytes, to compare with records: brokers compare hashes, which may collide."""
        tags = self.tags
        return None if tags is None else frozenset(tag.encode() for tag in tags)

    def merged(self, other: "Subscription") -> "Subscription":
        """The subscription for two handlers of one topic; raises BadFilter."""
        if self.kind != other.kind or (self.kind == SQL92 and self.expression != other.expression):
            raise BadFilter(
                f"two different filters for topic {self.topic}: {self.expression!r} and"
                f" {other.expression!r}",
                hint="a group has one filter per topic: use one SQL92 expression, or only tags",
            )
        if self.kind == SQL92:
            return self
        mine, others = self.tags, other.tags
        text = ALL if mine is None or others is None else " || ".join(sorted(mine | others))
        return Subscription(self.topic, text, TAG, max(self.version, other.version))

    def data(self) -> SubscriptionData:
        """The body for heartbeats."""
        tags = self.tags or frozenset()
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            tags_set=tags,
            code_set=frozenset(java_hash(tag) for tag in tags),
            sub_version=self.version,
            expression_type=self.kind,
        )


def split_tags(text: str | None) -> frozenset[str] | None:
    """The tags of "a || b"; None for all."""
    if text is None or not text.strip() or text.strip() == ALL:
        return None
    names = frozenset(name.strip() for name in text.split(_OR) if name.strip())
    if not names or ALL in names:
        return None
    return names
