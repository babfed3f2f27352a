"""Answers about messages: where is it, why was it not consumed, send it again.

    async with AsyncAdmin("localhost:9876") as admin:
        found = await find_messages(admin, "order-4711", topic="orders")
        explanation = await explain_message(admin, found.messages[0].message_id, "billing")
        print(explanation.text)

Gathering and deciding are separate: `*_gathering` queries the cluster, `*_decision` is a pure
function of what was gathered. Everything works with Penstock and Apache RocketMQ.
"""

from penstock.client.diagnosis.explain import explain_group, explain_message
from penstock.client.diagnosis.resending import (
    FailedMessage,
    ResendItem,
    ResendPlan,
    ResendProgress,
    ResendReport,
    SkippedMessage,
    plan_resend,
    resend,
    select_dead_letters,
    select_messages,
)
from penstock.client.diagnosis.search import SearchResult, find_messages
from penstock.client.diagnosis.values import (
    Explanation,
    Fact,
    FactKind,
    FactStatus,
    GroupExplanation,
    GroupVerdict,
    MessagePlace,
    Verdict,
)

__all__ = [
    "Explanation",
    "Fact",
    "FactKind",
    "FactStatus",
    "FailedMessage",
    "GroupExplanation",
    "GroupVerdict",
    "MessagePlace",
    "ResendItem",
    "ResendPlan",
    "ResendProgress",
    "ResendReport",
    "SearchResult",
    "SkippedMessage",
    "Verdict",
    "explain_group",
    "explain_message",
    "find_messages",
    "plan_resend",
    "resend",
    "select_dead_letters",
    "select_messages",
]
