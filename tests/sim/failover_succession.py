"""How a master that can't serve has another replica elected, in the simulation of failover.

As `ControlledBroker.cannot_serve` and what it calls; the methods have the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.wire.codes import ResponseCode
from tests.sim.failover_controllers import Answer, set_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.replication.controlled_role import ControlledRole, SetState
    from tests.sim.failover_broker import Broker

ELECTED = ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST


class Succession:
    """Of one process of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.before: tuple[int, frozenset[int]] = 0, frozenset()
        """The epoch in which the replica took over, and the in-sync set before."""

    def serves(self) -> None:
        if not self._broker.rules.gives_back_after_serving:
            self.before = 0, frozenset()
        if self._broker.role is not None:
            self._broker.role.unable = False

    def cannot_serve(self, then: Callable[[], None]) -> None:
        role = self._broker.role
        assert role is not None
        role.unable = True
        if role.leads and not self._broker.rules.serves_again:
            role.resign()
            self._broker.resign()
        self.have_replaced(then)

    def have_replaced(self, then: Callable[[], None]) -> None:
        """`then` is called when another replica is elected, or none can be."""
        role = self._broker.role
        assert role is not None
        state = role.state
        if state is None or state.master_id != role.own_id:
            then()
            return
        others = state.in_sync | state.before | self._given_back(role, state)
        self._try_others(role, sorted(others - {role.own_id}), then)

    def _try_others(
        self, role: ControlledRole, others: list[int], then: Callable[[], None]
    ) -> None:
        if not others:
            then()
            return
        broker, (other, *rest) = self._broker, others

        def done(elected: bool) -> None:
            state = role.state
            if elected or state is None or state.master_id != role.own_id:
                broker.world.events["gave way"] += 1
                then()
            else:
                self._try_others(role, rest, then)

        def learned(answer: Answer | None, tried: int) -> None:
            if answer is not None and answer.ok and answer.state is not None:
                broker.learn(set_state(answer.state))
            done(False)

        def asked(answer: Answer | None, tried: int) -> None:
            if answer is None:
                broker.calls.call(lambda to, reply: to.replica_info(reply), learned)
                return
            if answer.state is not None and answer.code in ELECTED:
                broker.learn(set_state(answer.state))
            done(answer.ok)

        def included(electable: bool | None) -> None:
            if electable:
                broker.calls.call(lambda to, reply: to.elect(other, reply, designated=True), asked)
            elif electable is None:
                broker.calls.call(lambda to, reply: to.replica_info(reply), learned)
            else:
                done(False)

        self._include(role, other, included)

    def _given_back(self, role: ControlledRole, state: SetState) -> frozenset[int]:
        epoch, members = self.before
        return members if epoch == state.master_epoch and not role.leads else frozenset()

    def _include(
        self, role: ControlledRole, other: int, then: Callable[[bool | None], None]
    ) -> None:
        """`then` gets whether the other replica can be elected; None if that is not known."""
        broker, state = self._broker, role.state
        assert state is not None
        if other in state.in_sync | state.before:
            then(True)
            return
        if other not in self._given_back(role, state):
            then(False)
            return

        def answered(answer: Answer | None, tried: int) -> None:
            if answer is not None and answer.ok and answer.state is not None:
                broker.world.events["set given back"] += 1
                broker.agreed(answer.state, state.master_epoch)
            then(None if answer is None else answer.ok)

        members, epoch, number = (
            frozenset([role.own_id, other]), state.master_epoch, state.in_sync_epoch,
        )  # fmt: skip
        broker.calls.call(
            lambda to, reply: to.alter(role.own_id, epoch, members, number, reply),
            answered,
            attempts=1,
        )
