"""Reads what controllers answer about a broker set."""

from typing import NamedTuple

from penstock.replication.controlled_role import SetState, read_ids
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.cluster_bodies import SyncStateSet
from penstock.wire.java_numbers import parse_long


class InSync(NamedTuple):
    """An in-sync set and its number."""

    in_sync: frozenset[int]
    number: int


def read_in_sync(response: Response) -> InSync:
    """The in-sync set in the body of a response."""
    if not response.body:
        return InSync(frozenset(), 0)
    body = fastjson.decode(response.body, SyncStateSet)
    return InSync(frozenset(body.sync_state_set), body.sync_state_set_epoch)


def read_state(response: Response) -> SetState:
    """The state of the set in a response."""
    fields = response.ext
    agreed = read_in_sync(response)
    return SetState(
        parse_long(fields.get("masterBrokerId", "")),
        fields.get("masterAddress", ""),
        parse_long(fields.get("masterEpoch", "")) or 0,
        agreed.in_sync,
        max(agreed.number, parse_long(fields.get("syncStateSetEpoch", "")) or 0),
        master_incomplete=fields.get("penstockMasterIncomplete") == "true",
        taken_over=fields.get("penstockTakesOver") != "true",
        before=read_ids(fields.get("penstockBefore", "")),
    )
