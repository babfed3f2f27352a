"""`explain` of a POP consumer names why nothing is received."""

from typing import Any

import pytest

from penstock.client.pop.popped_messages import PopTarget
from penstock.errors import PenstockError
from tests.unit.client.client_kit import BROKER
from tests.unit.client.pop.pop_consumer_kit import PopFixture


def test_missing_subscription_and_topic_are_explained(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        assert await fixture.consumer.explain() == ["there is no subscription"]
        fixture.consumer.subscribe("Typo")
        (text,) = await fixture.consumer.explain()
        assert text.startswith("no broker has the topic 'Typo'")

    run_test(body, subscribe=False)


def test_topic_that_was_never_popped_is_explained(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a")
        fixture.consumer.subscribe("T")
        assert await fixture.consumer.explain() == [
            "nothing was popped from T yet: call receive() or run()"
        ]

    run_test(body, subscribe=False)


def test_empty_topic_is_explained_until_a_message_comes(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("before")
        fixture.consumer.subscribe("T", "nobody")
        assert await fixture.receive() == []
        (text,) = await fixture.consumer.explain()
        assert text.startswith("there are no new messages of T for")
        assert "that match 'nobody'" in text
        fixture.consumer.subscribe("T")
        fixture.send("a")
        assert await fixture.receive()
        assert await fixture.consumer.explain() == []

    run_test(body, subscribe=False)


def test_failing_pops_are_explained_until_one_succeeds(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        source = fixture.consumer._source
        pop = source._pop

        async def fail(*args: Any) -> Any:
            raise PenstockError("the disk is on fire", hint="call the fire brigade")

        source._pop = fail  # type: ignore[method-assign]
        with pytest.raises(PenstockError, match="on fire"):
            await fixture.receive()
        assert list(source.failing) == [PopTarget("T", BROKER)]
        (text,) = await fixture.consumer.explain()
        assert text.startswith(f"pops of T at {BROKER} fail: the disk is on fire")
        source._pop = pop  # type: ignore[method-assign]
        fixture.send("a")
        assert await fixture.receive()
        assert await fixture.consumer.explain() == []

    run_test(body)
