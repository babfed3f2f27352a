"""Namespaces: topic `orders` of namespace `acme` is `acme%orders` on the wire.

The prefixes of retry and dead letter topics stay in front. System topics have no namespace.
"""

from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, is_system_topic

SEPARATOR = "%"


def with_namespace(namespace: str, name: str) -> str:
    """The name with its namespace, as servers know it."""
    if not namespace or not name or is_system_topic(name):
        return name
    prefix, bare = _split(name)
    if bare.startswith(namespace + SEPARATOR):
        return name
    return f"{prefix}{namespace}{SEPARATOR}{bare}"


def without_namespace(namespace: str, name: str) -> str:
    """The name without its namespace, as the application knows it."""
    if not namespace:
        return name
    prefix, bare = _split(name)
    return prefix + bare.removeprefix(namespace + SEPARATOR)


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
