"""Why a group has not consumed a message, and the state of a group: gather, then decide."""

from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.diagnosis.group.group_decision import decide_group
from penstock.client.diagnosis.group.group_facts import BEHIND_MS
from penstock.client.diagnosis.group.group_gathering import gather_group
from penstock.client.diagnosis.message_decision import decide_message
from penstock.client.diagnosis.message_gathering import gather_message
from penstock.client.diagnosis.values import Explanation, GroupExplanation


async def explain_message(
    admin: AsyncAdmin, message_id: str, group: str, topic: str | None = None
) -> Explanation:
    """Why a group has consumed a message, or has not.

    `message_id` is a unique id, an offset id or a place (`topic/broker/queue@offset`). Without a
    topic, the topics are searched. What can't be determined is unknown; raises only if no
    NameServer answers.
    """
    return decide_message(await gather_message(admin, message_id, group, topic))


async def explain_group(
    admin: AsyncAdmin, group: str, *, behind_ms: int = BEHIND_MS
) -> GroupExplanation:
    """The state of a group: members, subscriptions, owners, lag, retries, dead letters.

    A group whose oldest message waits longer than `behind_ms` is behind. Raises only if no
    NameServer answers.
    """
    return decide_group(await gather_group(admin, group), behind_ms=behind_ms)
