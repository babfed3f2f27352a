"""Why a POP consumer receives nothing: the reasons of `explain`.

A topic is checked in this order: no broker has it, pops fail, nothing was popped yet, nothing is
there. The failures of handlers follow.
"""

from penstock.client.client_session import Session
from penstock.client.consumer.subscription import Subscription
from penstock.client.handler_failures import HandlerFailures
from penstock.client.pop.pop_source import PopSource
from penstock.errors import PenstockError


class PopDiagnosis:
    """The diagnosis of one POP consumer."""

    def __init__(
        self,
        session: Session,
        group: str,
        source: PopSource,
        failures: HandlerFailures,
        *,
        from_first: bool,
    ) -> None:
        self._session = session
        self._group = group
        self._source = source
        self._failures = failures
        self._from_first = from_first

    async def explain(self) -> list[str]:
        """All reasons, by topic, then the failures of handlers."""
        subscriptions = list(self._source.subscriptions.items())
        reasons = [] if subscriptions else ["there is no subscription"]
        for topic, subscription in subscriptions:
            reasons += await self._reasons(topic, subscription)
        return reasons + self._failures.texts()

    async def _reasons(self, topic: str, subscription: Subscription) -> list[str]:
        source, name = self._source, self._session.without_namespace(topic)
        try:
            if await self._session.find_route(topic) is None:
                return [str(await self._session.nameservers.no_route(topic))]
        except PenstockError as error:
            return [error.remark()]
        failing = [
            f"pops of {name} at {target.broker_name} fail: {text}"
            for target, text in source.failing.items()
            if target.topic == topic
        ]
        if failing:
            return failing
        if topic not in source.received:
            return [f"nothing was popped from {name} yet: call receive() or run()"]
        if source.received[topic]:
            return []
        text = f"there are no new messages of {name} for {self._group}"
        if subscription.expression != "*":
            text += f" that match {subscription.expression!r}"
        if not self._from_first:
            text += '; a new group begins at the end of the queues unless start_at="first"'
        return [text]
