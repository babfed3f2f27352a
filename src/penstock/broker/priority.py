"""Priority messages, as in RocketMQ 5.4.

A send with the property `_SYS_MSG_PRIORITY_` is stored in the queue that has the number of its
priority, or in the topic's last write queue if the number is higher. A message has only one type:
if it is transactional, delayed or timed, or has a sharding key, the property is removed and the
message is stored in the queue it was sent to. A value that is not a number, or negative, has no
effect. A batch is stored in the queue it was sent to.

A higher number is more urgent, unless the setting `pop_higher_priority_first` is off: a pop from a
topic with `message.type=PRIORITY` then reads the queues from the lowest to the highest, otherwise
from the highest to the lowest. This is done for `priority.factor` percent of the group's pops.
"""

from typing import Final

from penstock.broker.delay.delay_levels import TIMER_PROPERTIES
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_PRIORITY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TRANSACTION_PREPARED,
)
from penstock.wire.java_numbers import parse_int

PRIORITY_FACTOR_DEFAULT: Final = 100
_OTHER_TYPES: Final = (PROPERTY_DELAY, *TIMER_PROPERTIES, PROPERTY_SHARDING_KEY)


def take_priority(properties: dict[str, str]) -> int | None:
    """The priority of a message, None if it has none; removed from a message of another type."""
    priority = parse_int(properties.get(PROPERTY_PRIORITY, ""))
    if priority is None or priority < 0:
        return None
    transactional = properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() == "true"
    if transactional or any(name in properties for name in _OTHER_TYPES):
        del properties[PROPERTY_PRIORITY]
        return None
    return priority


def priority_factor(topic: TopicConfig | None, group: SubscriptionGroupConfig | None) -> int:
    """Percent of a group's pops that read the topic's queues in the order of priority."""
    if topic is None or topic.attributes.get("message.type") != "PRIORITY":
        return 0
    factor = None if group is None else parse_int(group.attributes.get("priority.factor", ""))
    return PRIORITY_FACTOR_DEFAULT if factor is None else factor
